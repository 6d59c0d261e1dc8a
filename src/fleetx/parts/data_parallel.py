from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from fleetx.engine.context import SetupContext, StepContext
from fleetx.strategy.cost_model import CostTerms
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Stage, at

# MB. DistributedDataParallel closes a bucket once it is full, so each parameter gets its own.
_NO_FUSION = 1e-6


@settings
class DataParallel(Part):
    """Replicate the model on every rank, and average gradients bucket by bucket during backward.

    Always on; a no-op with one rank.
    """

    fuse_all_reduce_ops: bool = True
    """Reduce gradients in buckets. Otherwise each parameter is reduced separately, which is slower."""
    fuse_grad_size_in_MB: Annotated[float, Field(gt=0)] = 32  # noqa: N815  Paddle's name
    """Bucket size."""
    find_unused_parameters: bool = False
    """Detect parameters that the forward did not use; traverses the autograd graph in every step."""
    nccl_comm_num: Annotated[int, Field(ge=1)] = 1
    """Number of process groups that buckets are distributed over, round-robin."""

    always: ClassVar[bool] = True
    flat: ClassVar[dict[str, str]] = {
        name: name
        for name in ("fuse_all_reduce_ops", "fuse_grad_size_in_MB", "find_unused_parameters", "nccl_comm_num")
    }
    neutral: ClassVar[dict[str, str]] = {}
    costs: ClassVar[str] = "network: the size of the gradients, overlapped with backward; the buffers in every round"

    def problems(self) -> Iterator[str]:
        if not self.fuse_all_reduce_ops and self.fuse_grad_size_in_MB != type(self)().fuse_grad_size_in_MB:
            yield "fuse_grad_size_in_MB has no effect with fuse_all_reduce_ops=False: remove one of them"

    @property
    def _bucket(self) -> float:
        return self.fuse_grad_size_in_MB if self.fuse_all_reduce_ops else _NO_FUSION

    def cost(self, terms: CostTerms) -> None:
        terms.bucket = self._bucket * 2**20
        terms.bucket_copies = terms.gradients  # copied and divided: one pass more than summing

    @at(Stage.MODEL)
    def replicate(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """copy the model of rank 0 to every rank, and reduce gradients in buckets during backward"""
        ctx.notes["modules"] = list(model.modules())  # cheaper than traversing the model in every round
        ctx.network.communicators = self.nccl_comm_num
        ctx.replicate(bucket_cap_mb=self._bucket, find_unused_parameters=self.find_unused_parameters)
        return model

    @at(Stage.PARAMETER)
    def broadcast_buffers(self, params: list[Tensor], ctx: StepContext) -> None:
        """copy the buffers of rank 0 to every rank, so that evaluation needs no communication"""
        if ctx.replica_group.size > 1 and not ctx.per_rank:  # a part that lets ranks diverge also syncs their buffers
            buffers = [b for m in ctx.notes["modules"] for b in m._buffers.values() if b is not None]
            ctx.replica_group.broadcast(buffers)
