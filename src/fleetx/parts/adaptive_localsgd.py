from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from fleetx.engine.context import StepContext
from fleetx.parts._local_updates import LocalUpdates
from fleetx.strategy.effect import Effect, more
from fleetx.strategy.part import settings
from fleetx.strategy.stage import Fact, Stage, at

log = logging.getLogger(__name__)


@settings
class _AdaptivePeriod:
    init_k_steps: Annotated[int, Field(ge=1)] = 1
    """The first period, in rounds."""
    begin_step: Annotated[int, Field(ge=1)] = 1
    """Average in every round up to this one."""
    max_k_steps: Annotated[int, Field(ge=1)] = 16
    """The longest period."""


@settings
class AdaptiveLocalSGD(LocalUpdates, _AdaptivePeriod):
    """LocalSGD with a period that follows the loss and the learning rate.

    k = ceil(sqrt(lr_0 * loss / (lr * loss_0)) * init_k_steps), between 1 and max_k_steps: rare averages at first,
    frequent ones later (Wang and Joshi 2019; Paddle puts init_k_steps under the root). loss is the mean over the ranks.
    Neutral: max_k_steps=1 with plain SGD is data parallelism.
    """

    neutral: ClassVar[dict[str, Any]] = {"allow_single": True, "max_k_steps": 1}
    effect: ClassVar[Effect] = more("ranks_apart", "ranks differ between averages")
    example: ClassVar[dict[str, int]] = {"init_k_steps": 2}
    costs: ClassVar[str] = "network: per period, the size of the parameters and one number"

    def problems(self) -> Iterator[str]:
        if self.init_k_steps > self.max_k_steps:
            yield f"init_k_steps = {self.init_k_steps}: must be at most max_k_steps = {self.max_k_steps}"
        yield from super().problems()

    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        return super().init(params) | {"k": self.init_k_steps, "loss": 0.0, "lr": 0.0}

    def period(self) -> int:
        return self.init_k_steps

    @at(Stage.PARAMETER, needs={Fact.LOCAL}, ends={Fact.APART})
    def average(self, params: list[Tensor], ctx: StepContext) -> None:
        """average the parameters over the ranks at the end of a period that follows the loss and the learning rate"""
        ctx.broadcast_in_island()
        state = ctx.state
        adapts = self.max_k_steps > 1  # otherwise the loss is not needed
        if adapts and not (state["loss"] and state["lr"]):  # in round 1, unless its loss or learning rate is of no use
            loss = ctx.loss()
            if loss is not None and math.isfinite(loss):
                state["loss"], state["lr"] = loss, ctx.lr
        ended = self.end_periods(params, ctx, self.begin_step, state["k"])
        if ended and adapts and ctx.round > self.begin_step:
            self._adapt(ctx)

    def _adapt(self, ctx: StepContext) -> None:
        state, loss, lr = ctx.state, ctx.loss(), ctx.lr
        before = state["k"]
        if loss is not None and lr > 0 and state["loss"] > 0 and loss >= 0 and math.isfinite(loss):
            k = math.ceil(math.sqrt(state["lr"] * loss / (lr * state["loss"])) * self.init_k_steps)
            state["k"] = min(max(k, 1), self.max_k_steps)
        if state["k"] != before and ctx.replica_group.rank == 0:
            log.info("round %d: period changed from %d to %d rounds (loss %.4g)", ctx.round, before, state["k"], loss)

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        yield from super().remarks(ctx)
        if ctx is not None and ctx.network.world.size > 1:
            yield f"the current period is {ctx.state['k']} rounds"
