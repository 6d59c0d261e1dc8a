from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.module_names import sparse_modules
from fleetx.comm.world import World
from fleetx.engine.context import StepContext
from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class GradientMerge(Part):
    """Update once in `k_steps` steps, with the mean of their gradients, reduced between ranks once.

    g = (g_1 + ... + g_m) / m, where m is the true number of steps in the window (smaller than k_steps after `flush`).
    Neutral: k_steps=1. Equals one batch k_steps times as large, for losses that are means over equal batches; over
    unequal ones with `fleet.weight`.
    """

    k_steps: Annotated[int, Field(ge=1)] = 1
    """Steps that are merged into one update."""
    avg: bool = True
    """Divide by the number of merged steps; without it the update takes the sum."""

    neutral: ClassVar[dict[str, int]] = {"k_steps": 1}
    costs: ClassVar[str] = "memory: the gradients are kept between steps; network: one reduction in k_steps"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        if sparse := sparse_modules(model):
            yield f"gradient_merge cannot take sparse gradients, which {sparse} makes: use sparse=False there"

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        batch = cluster.global_batch or 1
        return (Offer({"k_steps": k}) for k in range(2, batch + 1) if batch % k == 0)

    def cost(self, terms: CostTerms) -> None:
        terms.merged = self.k_steps
        terms.streamed += 3 * (self.k_steps - 1) * terms.gradients  # two are read, and their sum is written

    @at(Stage.GATE, makes={Fact.SUMMED}, when=lambda self: self.k_steps > 1)
    def opens(self, steps: int, ctx: StepContext) -> bool:
        """let every k_steps-th step update, and only its backward communicate"""
        return steps >= self.k_steps

    @at(Stage.GRADIENT, needs={Fact.SUMMED}, ends={Fact.SUMMED}, when=lambda self: self.k_steps > 1 and self.avg)
    def mean(self, grads: list[Tensor], ctx: StepContext) -> None:
        """divide the summed gradient by the number of steps in it"""
        torch._foreach_div_(grads, ctx.divisor)
