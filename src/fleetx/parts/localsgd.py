from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from fleetx.comm.world import World
from fleetx.engine.context import Bucket, StepContext
from fleetx.parts import _local_updates as local_updates
from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class LocalSGD(Part):
    """Let every rank update alone, and average the parameters once in `k_steps` rounds.

    p <- mean over ranks of p. With the outer optimizer: d = a - mean(p), b <- outer_momentum * b + d,
    p <- a - outer_lr * (d + outer_momentum * b), a being the parameters after the last average (Douillard et al. 2023).
    Neutral: k_steps=1 with plain SGD is data parallelism.
    """

    k_steps: Annotated[int, Field(ge=1)] = 1
    """Rounds between two averages."""
    begin_step: Annotated[int, Field(ge=1)] = 1
    """Until this round the parameters are averaged in every round."""
    average_momentum: bool = False
    """Average what the optimizer has gathered too."""
    average_buffers: bool = False
    """Average BatchNorm's statistics; without it every rank takes those of rank 0."""
    overlap: bool = False
    """Take the average while the next rounds run, and bring it in with the following one."""
    overlap_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """How much of the distance to such an average, which is a period old, is brought in."""
    outer_lr: Annotated[float, Field(gt=0)] = 1.0
    """The rate of the outer optimizer."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The Nesterov momentum of the outer optimizer."""
    allow_single: bool = False
    """Do not mind that there is one rank only, for debugging."""

    neutral: ClassVar[dict[str, Any]] = {"allow_single": True}
    costs: ClassVar[str] = "network: the size of the parameters once in k_steps rounds, none during backward"

    def problems(self) -> Iterator[str]:
        yield from local_updates.problems(self)

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        yield from local_updates.incompatibilities("localsgd", self, world)

    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        return {"last": 0}

    def keeps(self, params: Iterable[Tensor], *, scaled: bool) -> int:
        return local_updates.keeps(self, params)

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        if cluster.ranks > 1:
            yield Offer({"k_steps": 4}, "lossy")

    def cost(self, terms: CostTerms) -> None:
        terms.reduce_every, terms.after_backward, terms.averages_parameters = self.k_steps, True, True

    @at(Stage.REDUCE, makes={Fact.LOCAL})
    def keep(self, bucket: Bucket, ctx: StepContext) -> Future[Tensor]:
        """leave the gradient on its rank"""
        return local_updates.keep(self, bucket, ctx)

    @at(Stage.PARAMETER, needs={Fact.LOCAL})
    def average(self, params: list[Tensor], ctx: StepContext) -> None:
        """average the parameters over the ranks once in k_steps rounds"""
        if ctx.round <= self.begin_step or ctx.round - ctx.state["last"] >= self.k_steps:
            local_updates.average(self, params, ctx)

    def drain(self, params: list[Tensor], ctx: StepContext, *, last: bool) -> None:
        local_updates.drain(self, params, ctx, last=last)
