from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.optim import SGD, Optimizer

from fleetx.comm.world import World
from fleetx.engine.context import SetupContext, StepContext
from fleetx.errors import NOT_BUILT
from fleetx.optim import Lars, parameter_names
from fleetx.optim.adopt import adopt, adoption_problems
from fleetx.optim.dispatch import kernels_remark
from fleetx.strategy.effect import Effect, differs
from fleetx.strategy.part import NameList, Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class LarsPart(Part):
    """Layer-wise adaptive rate scaling: momentum SGD that scales the rate of each tensor by |p| / |g|.

    Neutral: lars_coeff=None, lars_weight_decay=0.
    """

    lars_coeff: Annotated[float, Field(gt=0)] | None = 0.001
    """The trust coefficient; None turns scaling off."""
    lars_weight_decay: Annotated[float, Field(ge=0)] = 0.0005
    """Weight decay, inside the formula."""
    epsilon: Annotated[float, Field(ge=0)] = 0.0
    """Added to the denominator."""
    exclude_from_weight_decay: NameList = Field(default_factory=list)
    """Substrings of parameter names. Matching parameters get plain momentum without weight decay."""

    neutral: ClassVar[dict[str, Any]] = {"lars_coeff": None, "lars_weight_decay": 0.0}
    effect: ClassVar[Effect] = differs("distance", "updates differ in length")
    example: ClassVar[dict[str, float]] = {"lars_coeff": 0.02}
    costs: ClassVar[str] = "time: one pass more than SGD over parameters and gradients, for the norms"

    def problems(self) -> Iterator[str]:
        if self.lars_coeff is None and self.epsilon:
            yield "epsilon has no effect with lars_coeff=None, which turns scaling off: remove one of them"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        wanted = "torch.optim.SGD with momentum"
        yield from adoption_problems("lars", optimizer, (SGD,), wanted, Lars, self._own_options)
        if type(optimizer) is SGD:
            if any(not group["momentum"] for group in optimizer.param_groups):
                yield "lars needs momentum: pass, for example, momentum=0.9 to SGD"
            if any(group["dampening"] for group in optimizer.param_groups):
                yield f"lars with dampening {NOT_BUILT}: pass dampening=0 to SGD"
        yield from parameter_names.problems("lars", model, optimizer, self.exclude_from_weight_decay)

    @at(
        Stage.UPDATE,
        bars={Fact.SCALED, Fact.SUMMED, Fact.MOMENTUM},
        because="its formula takes the norm of the gradient itself, and adds momentum",
    )
    def scale(self, optimizer: Optimizer, ctx: SetupContext) -> Optimizer:
        """local rate = lr * lars_coeff * |p| / (|g| + decay * |p| + epsilon) for each tensor, then momentum"""
        find = partial(parameter_names.positions, ctx.model, self.exclude_from_weight_decay)
        return adopt(optimizer, Lars, lambda group: self._own_options(group, find(group["params"])))

    def _own_options(self, group: dict[str, Any], excluded: list[int]) -> dict[str, Any]:
        own = {"weight_decay": self.lars_weight_decay, "lars_coeff": self.lars_coeff, "epsilon": self.epsilon}
        return own | {"excluded": excluded}

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        yield kernels_remark(torch.device("cpu") if ctx is None else ctx.replica_group.device)
