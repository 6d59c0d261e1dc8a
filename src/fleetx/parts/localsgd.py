from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from fleetx.engine.context import StepContext
from fleetx.parts._local_updates import LocalUpdates
from fleetx.strategy.cost_model import Cluster, Offer
from fleetx.strategy.effect import Effect, more
from fleetx.strategy.part import settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class _FixedPeriod:
    k_steps: Annotated[int, Field(ge=1)] = 1
    """Rounds between two averages."""
    begin_step: Annotated[int, Field(ge=1)] = 1
    """Average in every round up to this one."""


@settings
class LocalSGD(LocalUpdates, _FixedPeriod):
    """Let each rank update on its own, and average the parameters every `k_steps` rounds.

    p <- mean over ranks of p. With the outer optimizer: d = a - mean(p), b <- outer_momentum * b + d,
    p <- a - outer_lr * (d + outer_momentum * b), where a is p after the previous average (Douillard et al. 2023).
    Neutral: k_steps=1 with plain SGD is data parallelism.
    """

    neutral: ClassVar[dict[str, Any]] = {"allow_single": True}
    effect: ClassVar[Effect] = more("ranks_apart", "ranks differ between averages")
    example: ClassVar[dict[str, int]] = {"k_steps": 2}
    costs: ClassVar[str] = "network: the size of the parameters every k_steps rounds, none during backward"

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        if cluster.ranks > 1:
            yield Offer({"k_steps": 4}, "lossy")
        if 1 < cluster.ranks_per_host < cluster.ranks:
            yield Offer({"k_steps": 4, "group_size": cluster.ranks_per_host}, "lossy")

    def period(self) -> int:
        return self.k_steps

    @at(Stage.PARAMETER, needs={Fact.LOCAL}, ends={Fact.APART})
    def average(self, params: list[Tensor], ctx: StepContext) -> None:
        """average the parameters over the ranks, or over the islands, every k_steps rounds"""
        ctx.broadcast_in_island()
        self.end_periods(params, ctx, self.begin_step, self.k_steps)
