from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from fleetx.comm.world import World
from fleetx.engine.context import Bucket, StepContext
from fleetx.parts import _local_updates as local_updates
from fleetx.strategy.cost_model import CostTerms
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at

log = logging.getLogger(__name__)


@settings
class AdaptiveLocalSGD(Part):
    """LocalSGD whose period follows the loss and the learning rate.

    k = ceil(sqrt(lr_0 * loss / (lr * loss_0)) * init_k_steps), from 1 to max_k_steps: often at the end, seldom at the
    beginning (Wang and Joshi 2019; Paddle has init_k_steps inside of the root). loss is the mean over the ranks.
    Neutral: max_k_steps=1 with plain SGD is data parallelism.
    """

    init_k_steps: Annotated[int, Field(ge=1)] = 1
    """The first period."""
    begin_step: Annotated[int, Field(ge=1)] = 1
    """Until this round the parameters are averaged in every round."""
    max_k_steps: Annotated[int, Field(ge=1)] = 16
    """The longest period."""
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

    neutral: ClassVar[dict[str, Any]] = {"allow_single": True, "max_k_steps": 1}
    costs: ClassVar[str] = "network: the size of the parameters once in a period, and one number in each"

    def problems(self) -> Iterator[str]:
        if self.init_k_steps > self.max_k_steps:
            yield f"init_k_steps = {self.init_k_steps} is above max_k_steps = {self.max_k_steps}"
        yield from local_updates.problems(self)

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        yield from local_updates.incompatibilities("adaptive_localsgd", self, world)

    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        return {"last": 0, "k": self.init_k_steps, "loss": 0.0, "lr": 0.0}

    def keeps(self, params: Iterable[Tensor], *, scaled: bool) -> int:
        return local_updates.keeps(self, params)

    def cost(self, terms: CostTerms) -> None:
        terms.reduce_every, terms.after_backward, terms.averages_parameters = self.init_k_steps, True, True

    @at(Stage.REDUCE, makes={Fact.LOCAL})
    def keep(self, bucket: Bucket, ctx: StepContext) -> Future[Tensor]:
        """leave the gradient on its rank"""
        return local_updates.keep(self, bucket, ctx)

    @at(Stage.PARAMETER, needs={Fact.LOCAL})
    def average(self, params: list[Tensor], ctx: StepContext) -> None:
        """average the parameters over the ranks at the end of a period that follows loss and rate"""
        state = ctx.state
        follows = self.max_k_steps > 1  # else there is nothing to choose, and the loss need not be seen
        if follows and not (state["loss"] and state["lr"]):  # in round 1, unless its rate was 0
            state["loss"], state["lr"] = ctx.loss(), ctx.lr
        if ctx.round <= self.begin_step or ctx.round - state["last"] >= state["k"]:
            local_updates.average(self, params, ctx)
            if follows and ctx.round > self.begin_step:
                self._adapt(ctx)

    def _adapt(self, ctx: StepContext) -> None:
        state, loss, lr = ctx.state, ctx.loss(), ctx.lr
        before = state["k"]
        if lr > 0 and state["loss"] > 0 and loss >= 0 and math.isfinite(loss):
            k = math.ceil(math.sqrt(state["lr"] * loss / (lr * state["loss"])) * self.init_k_steps)
            state["k"] = min(max(k, 1), self.max_k_steps)
        if state["k"] != before and ctx.replica_group.rank == 0:
            log.info("round %d: a period of %d rounds, it was %d (loss %.4g)", ctx.round, state["k"], before, loss)

    def drain(self, params: list[Tensor], ctx: StepContext, *, last: bool) -> None:
        local_updates.drain(self, params, ctx, last=last)

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is not None:
            yield f"the period is {ctx.state['k']} rounds now"
