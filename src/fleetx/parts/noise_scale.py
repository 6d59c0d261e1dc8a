from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fleetx.base.trees import samples_in
from fleetx.engine.context import SetupContext, StepContext
from fleetx.strategy.cost_model import CostTerms
from fleetx.strategy.effect import Effect, more
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class NoiseScale(Part):
    """Measure the gradient noise scale for `fleet.noise_scale()`: how large a batch still pays off.

    tr(C) / |G|^2, where G is the gradient and C the covariance of a single sample's gradient (McCandlish et al. 2018),
    from the norms of one step's gradient on a rank and of the update's. Neutral: any setting; training is unchanged.
    """

    every: Annotated[int, Field(ge=1)] = 8
    """Rounds from one measurement to the next."""
    window: Annotated[int, Field(ge=8)] = 256
    """How many of the latest measurements to keep."""

    dense: ClassVar[bool] = True
    neutral: ClassVar[dict[str, int]] = {}
    effect: ClassVar[Effect] = more("measured", "norms are measured")
    example: ClassVar[dict[str, int]] = {"every": 1}
    costs: ClassVar[str] = "time: two norms of the gradients, once every few rounds"

    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        # For each measurement: its steps over all ranks, 1 / samples of the measured step and summed over this rank's
        # steps, and the squared norms.
        return {"count": 0, "steps": [], "shares": [], "squares": None}

    def for_other_ranks(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self.init({})  # with other ranks, batches differ

    def cost(self, terms: CostTerms) -> None:
        terms.streamed += 2 * terms.gradients / self.every

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is not None and ctx.replica_group.size == 1 and not ctx.plan.at(Stage.GATE):
            yield "cannot be measured here: with one replica and no gradient_merge, all batches are the same size"

    # --- acts -------------------------------------------------------------------------------------
    @at(Stage.MODEL)
    def watch(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """measure the gradient of a single step before it is merged or reduced"""
        ctx.measure_steps(self.every)
        return model

    @at(Stage.FORWARD, replay=False)
    @contextmanager
    def see(self, ctx: StepContext) -> Iterator[None]:
        """note the number of samples in a step"""
        outermost = not ctx.in_progress.get("inside")  # a model may call itself
        if outermost and torch.is_grad_enabled():
            feeds, step = ctx.in_progress.setdefault("feeds", {}), ctx.clock[1]
            # Which of several forwards the gradient is of, or whether of all, cannot be known.
            feeds[step] = math.nan if step in feeds else samples_in(ctx.inputs) or 1
        ctx.in_progress["inside"] = True
        try:
            yield
        finally:
            ctx.in_progress["inside"] = not outermost

    @at(
        Stage.GRADIENT,
        bars={Fact.SCALED, Fact.SUMMED, Fact.CHANGED},
        because="their norm is not that of the gradient",
        unbuilt={Fact.LOCAL, Fact.PARTED, Fact.STAGED, Fact.MOMENTUM, Fact.RESIDUAL},
    )
    def measure(self, grads: list[Tensor], ctx: StepContext) -> None:
        """measure the gradient of the update"""
        small = ctx.step_square
        if small is not None:
            ctx.in_progress["squares"] = torch.stack([small, ctx.norm(grads).to(small.device).double().square()])

    @at(Stage.PARAMETER)
    def record(self, params: list[Tensor], ctx: StepContext) -> None:
        """keep both norms, if the update was applied and they belong to different batches"""
        squares, feeds = ctx.in_progress.pop("squares", None), ctx.in_progress.pop("feeds", {})
        steps = ctx.clock[1] * ctx.replica_group.size  # over all ranks, in this update
        if squares is None or not ctx.updated or steps == 1:
            return
        state = ctx.state
        if state["squares"] is None:
            state["squares"] = torch.zeros(self.window, 2, dtype=torch.float64, device=squares.device)
        place = state["count"] % self.window
        state["squares"][place].copy_(squares)
        state["steps"][place : place + 1] = [steps]
        first = next(iter(feeds.values()), math.nan)  # stands for the steps of which this rank has skipped the forward
        shares = [1 / feeds.get(step, first) for step in range(ctx.clock[1])]
        state["shares"][place : place + 1] = [[shares[0], sum(shares)]]
        state["count"] += 1
