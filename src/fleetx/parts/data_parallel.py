from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.module_names import sparse_problem
from fleetx.comm.world import World
from fleetx.engine.context import SetupContext, StepContext
from fleetx.strategy.cost_model import CostTerms
from fleetx.strategy.effect import Effect, more
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at

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
    broadcast_buffers: bool = True
    """Copy the buffers of rank 0 to every rank after each round."""

    always: ClassVar[bool] = True
    neutral: ClassVar[dict[str, str]] = {}
    effect: ClassVar[Effect] = more("bytes_sent", "gradients are sent")
    costs: ClassVar[str] = (
        "network: the size of the gradients, overlapped with backward; changed buffers in every round"
    )

    def problems(self) -> Iterator[str]:
        if not self.fuse_all_reduce_ops and self.fuse_grad_size_in_MB != type(self)().fuse_grad_size_in_MB:
            yield "fuse_grad_size_in_MB has no effect with fuse_all_reduce_ops=False: remove one of them"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        if self.nccl_comm_num > 1:
            yield from sparse_problem("nccl_comm_num", model)

    @property
    def _bucket(self) -> float:
        return self.fuse_grad_size_in_MB if self.fuse_all_reduce_ops else _NO_FUSION

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is None:
            return
        buckets = ("fuse_all_reduce_ops", "fuse_grad_size_in_MB")
        if ctx.reduced:
            yield from self._without_effect(buckets, "under sharding, which reduces segment by segment")
        elif ctx.replica_group.size == 1:
            yield from self._without_effect(self.flat, "here: there is one replica of the model, so nothing is sent")

    def _without_effect(self, names: Iterable[str], why: str) -> Iterator[str]:
        default = type(self)()
        yield from (f"{n} has no effect {why}" for n in names if getattr(self, n) != getattr(default, n))

    def cost(self, terms: CostTerms) -> None:
        terms.bucket = self._bucket * 2**20
        terms.bucket_copies = terms.gradients  # copied and divided: one pass more than summing

    @at(Stage.MODEL)
    def replicate(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """copy the model of rank 0 to every rank, and reduce gradients in buckets during backward"""
        ctx.replicate(
            bucket_cap_mb=self._bucket,
            find_unused_parameters=self.find_unused_parameters,
            broadcast_buffers=self.broadcast_buffers,
        )
        return model

    @at(Stage.MODEL, makes={Fact.ROUTED}, when=lambda self: self.nccl_comm_num > 1)
    def spread(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """distribute the buckets over several process groups"""
        ctx.network.communicators = self.nccl_comm_num
        return model

    @at(Stage.PARAMETER, when=lambda self: self.broadcast_buffers)
    def send_buffers(self, params: list[Tensor], ctx: StepContext) -> None:
        """copy the buffers of rank 0 to every rank, so that evaluation needs no communication"""
        if not ctx.per_rank:  # a part that lets ranks diverge also syncs their buffers
            ctx.broadcast_buffers()
