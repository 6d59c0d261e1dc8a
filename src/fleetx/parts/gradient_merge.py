from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.base.module_names import sparse_modules
from fleetx.comm.world import World
from fleetx.engine.context import StepContext
from fleetx.errors import NOT_BUILT
from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.effect import Effect, less
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class GradientMerge(Part):
    """Update every `k_steps` steps with the mean of their gradients, which are reduced between ranks only once.

    g = (g_1 + ... + g_m) / m, where m is the number of steps in the window (fewer than k_steps after `flush`).
    Neutral: k_steps=1. Equals one batch k_steps times as large, for losses that are means over batches of equal size,
    or of any size with `fleet.weight`.
    """

    k_steps: Annotated[int, Field(ge=1)] = 1
    """Number of steps merged into one update."""
    avg: bool = True
    """Divide by the number of merged steps. Otherwise the update uses the sum."""

    neutral: ClassVar[dict[str, int]] = {"k_steps": 1}
    effect: ClassVar[Effect] = less("updates", "fewer steps update", than=0.7)
    example: ClassVar[dict[str, int]] = {"k_steps": 2}
    costs: ClassVar[str] = "memory: gradients are kept between steps; network: one reduction every k_steps steps"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        if sparse := sparse_modules(model):
            yield f"gradient_merge with the sparse gradients of {sparse} {NOT_BUILT}: set sparse=False there"

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        batch = cluster.global_batch or 1
        return (Offer({"k_steps": k}) for k in range(2, batch + 1) if batch % k == 0)

    def cost(self, terms: CostTerms) -> None:
        terms.merged = self.k_steps
        terms.streamed += 3 * (self.k_steps - 1) * terms.gradients  # two reads and one write

    @at(Stage.GATE, makes={Fact.SUMMED}, when=lambda self: self.k_steps > 1 and self.avg)
    def opens(self, steps: int, ctx: StepContext) -> bool:
        """update only in every k_steps-th step, and communicate only in its backward"""
        return steps >= self.k_steps

    @at(Stage.GATE, when=lambda self: self.k_steps > 1 and not self.avg)  # the sum is what the user asked for
    def opens_for_sum(self, steps: int, ctx: StepContext) -> bool:
        """update only in every k_steps-th step, with the sum of its gradients, and communicate only in its backward"""
        return steps >= self.k_steps

    @at(Stage.GRADIENT, needs={Fact.SUMMED}, ends={Fact.SUMMED}, when=lambda self: self.k_steps > 1 and self.avg)
    def mean(self, grads: list[Tensor], ctx: StepContext) -> None:
        """divide the summed gradient by the number of merged steps"""
        seams.foreach_div_(grads, ctx.divisor)
