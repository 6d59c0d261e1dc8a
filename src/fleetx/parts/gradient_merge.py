from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from fleetx.base import seams
from fleetx.engine.context import StepContext
from fleetx.optim.schedule import batch_ratio
from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.effect import Effect, less
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at

_Stretch = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)]
Stretches = Annotated[
    list[_Stretch],
    BeforeValidator(
        lambda v: [list(s) if isinstance(s, tuple) else s for s in v] if isinstance(v, list | tuple) else v
    ),
]


def _merges(part: GradientMerge) -> bool:
    return part.k_steps > 1 or any(k > 1 for _, k in part.rampup)


def _averages(part: GradientMerge) -> bool:
    return _merges(part) and part.avg


def _counts_samples(part: GradientMerge) -> bool:
    return part.rampup_unit == "samples"


@settings
class GradientMerge(Part):
    """Update every `k_steps` steps with the mean of their gradients, which are reduced between ranks only once.

    g = (g_1 + ... + g_m) / m, where m is the number of steps in the window (fewer than k_steps after `flush`).
    Neutral: k_steps=1. Equals one batch k_steps times as large, for losses that are means over batches of equal size,
    or of any size with `fleet.weight`. With `rampup`, the batch grows during training.
    """

    k_steps: Annotated[int, Field(ge=1)] = 1
    """Number of steps merged into one update."""
    avg: bool = True
    """Divide by the number of merged steps. Otherwise the update uses the sum."""
    rampup: Stretches = Field(default_factory=list)
    """Begin with smaller batches: [[100, 2], [300, 4]] merges 2 steps until round 100, 4 until 300, then k_steps."""
    rampup_unit: Literal["rounds", "samples"] = "rounds"
    """What the first numbers of `rampup` count: rounds, or samples over all ranks, which needs rampup_feed."""
    rampup_feed: Annotated[int, Field(ge=1)] | None = None
    """Samples per step on each replica."""
    rampup_lr: Literal["none", "linear", "sqrt"] = "none"
    """How to scale the learning rate: an update of k merged steps uses lr * k / k_steps, or lr * sqrt(k / k_steps)."""

    dense: ClassVar[bool] = True
    neutral: ClassVar[dict[str, int]] = {"k_steps": 1}
    effect: ClassVar[Effect] = less("updates", "fewer steps update", than=0.7)
    example: ClassVar[dict[str, int]] = {"k_steps": 2}
    costs: ClassVar[str] = "memory: gradients are kept between steps; network: one reduction every k_steps steps"

    def problems(self) -> Iterator[str]:
        ends = [end for end, _ in self.rampup]
        if ends != sorted(set(ends)):
            yield f"rampup = {self.rampup}: each pair is (until, steps); `until` must increase"
        if not self.rampup:
            for key in ("rampup_unit", "rampup_feed", "rampup_lr"):
                if getattr(self, key) != getattr(type(self)(), key):
                    yield f"{key} has no effect without rampup: set rampup, or remove it"
        elif _counts_samples(self) and self.rampup_feed is None:
            yield "rampup_unit = 'samples' needs rampup_feed: set it to the number of samples per step on each replica"
        elif not _counts_samples(self) and self.rampup_feed is not None:
            yield "rampup_feed has no effect with rampup_unit = 'rounds': remove it, or set rampup_unit = 'samples'"

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        batch = cluster.global_batch or 1
        return (Offer({"k_steps": k}) for k in range(2, batch + 1) if batch % k == 0)

    def cost(self, terms: CostTerms) -> None:
        terms.merged = self.k_steps  # after the ramp-up
        terms.streamed += 3 * (self.k_steps - 1) * terms.gradients  # two reads and one write

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if self.rampup:
            steps = ", ".join(f"{k} until {self.rampup_unit[:-1]} {end}" for end, k in self.rampup)
            rate = "stays as it is" if self.rampup_lr == "none" else f"follows the rule {self.rampup_lr!r}"
            now = "" if ctx is None else f"; now {self.merged(ctx)}"
            yield f"merged steps: {steps}, then {self.k_steps}{now}. The learning rate {rate}"
            yield "predicted times and bytes apply after the ramp-up"

    # --- the ramp-up ------------------------------------------------------------------------------
    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        return {"samples": 0} if _counts_samples(self) else {}

    def merged(self, ctx: StepContext) -> int:
        """Number of steps that this round merges."""
        done = ctx.state["samples"] if _counts_samples(self) else ctx.round
        return next((k for end, k in self.rampup if done < end), self.k_steps)

    @at(Stage.PARAMETER, when=_counts_samples)
    def count(self, params: list[Tensor], ctx: StepContext) -> None:
        """count the samples of this round, for the ramp-up"""
        _, steps = ctx.clock
        ctx.state["samples"] += steps * (self.rampup_feed or 0) * ctx.replica_group.size

    @at(Stage.GRADIENT, when=lambda self: self.rampup_lr != "none")
    def scale_rate(self, grads: list[Tensor], ctx: StepContext) -> None:
        """scale the learning rate of this update with its batch size"""
        ctx.scale_rate(batch_ratio(self.rampup_lr, self.merged(ctx), self.k_steps))

    # --- merging ----------------------------------------------------------------------------------
    @at(Stage.GATE, makes={Fact.SUMMED}, when=_averages)
    def opens(self, steps: int, ctx: StepContext) -> bool:
        """update only in every k_steps-th step, and communicate only in its backward"""
        return steps >= self.merged(ctx)

    @at(Stage.GATE, when=lambda self: _merges(self) and not self.avg)  # the sum is what the user asked for
    def opens_for_sum(self, steps: int, ctx: StepContext) -> bool:
        """update only in every k_steps-th step, with the sum of its gradients, and communicate only in its backward"""
        return steps >= self.merged(ctx)

    @at(Stage.GRADIENT, needs={Fact.SUMMED}, ends={Fact.SUMMED}, when=_averages)
    def mean(self, grads: list[Tensor], ctx: StepContext) -> None:
        """divide the summed gradient by the number of merged steps"""
        if grads:  # a rank that updates on its own may have left out the whole window
            seams.foreach_div_(grads, ctx.divisor)
