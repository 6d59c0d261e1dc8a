from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from fleetx.engine.context import SetupContext, StepContext
from fleetx.strategy.cost_model import CostTerms
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Stage, at

# DistributedDataParallel closes a bucket once it is full: with no room at all each parameter travels alone.
_ALONE = 1e-6


@settings
class DataParallel(Part):
    """Every rank holds the whole model; the mean of the gradients is taken bucket by bucket while backward runs.

    Always there. With one rank it does nothing.
    """

    fuse_all_reduce_ops: bool = True
    """Reduce gradients in buckets; without it each parameter is reduced alone, which is slower."""
    fuse_grad_size_in_MB: Annotated[float, Field(gt=0)] = 32  # noqa: N815  Paddle's name
    """The size of a bucket."""
    find_unused_parameters: bool = False
    """Look for parameters that took no part in the forward; costs a walk over the graph in each step."""
    nccl_comm_num: Annotated[int, Field(ge=1)] = 1
    """Process groups over which the buckets go in turn."""

    always: ClassVar[bool] = True
    flat: ClassVar[dict[str, str]] = {
        name: name
        for name in ("fuse_all_reduce_ops", "fuse_grad_size_in_MB", "find_unused_parameters", "nccl_comm_num")
    }
    neutral: ClassVar[dict[str, str]] = {}
    costs: ClassVar[str] = "network: the size of the gradients, overlapped with backward; the buffers after each round"

    def problems(self) -> Iterator[str]:
        if not self.fuse_all_reduce_ops and self.fuse_grad_size_in_MB != type(self)().fuse_grad_size_in_MB:
            yield "fuse_grad_size_in_MB has no effect with fuse_all_reduce_ops=False: remove one of them"

    @property
    def _bucket(self) -> float:
        return self.fuse_grad_size_in_MB if self.fuse_all_reduce_ops else _ALONE

    def cost(self, terms: CostTerms) -> None:
        terms.bucket = self._bucket * 2**20
        terms.bucket_copies = terms.gradients  # copied there and divided: one pass more than to add them up

    @at(Stage.MODEL)
    def replicate(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """give every rank the same model, and reduce its gradients by buckets during backward"""
        ctx.notes["modules"] = list(model.modules())  # to walk over the model in every round would cost more
        ctx.network.communicators = self.nccl_comm_num
        ctx.replicate(bucket_cap_mb=self._bucket, find_unused_parameters=self.find_unused_parameters)
        return model

    @at(Stage.PARAMETER)
    def share(self, params: list[Tensor], ctx: StepContext) -> None:
        """give every rank the buffers of rank 0, so that evaluation agrees and needs no communication"""
        if ctx.replica_group.size > 1 and not ctx.per_rank:  # who parts the ranks brings them together again
            buffers = [b for m in ctx.notes["modules"] for b in m._buffers.values() if b is not None]
            ctx.replica_group.broadcast(buffers)
