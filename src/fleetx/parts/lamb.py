from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from fleetx.comm.world import World
from fleetx.engine.context import SetupContext, StepContext
from fleetx.optim import Lamb, parameter_names
from fleetx.optim.adopt import adopt, adoption_problems
from fleetx.optim.dispatch import kernels_remark
from fleetx.strategy.effect import Effect, differs
from fleetx.strategy.part import NameList, Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class LambPart(Part):
    """Layer-wise adaptive moments: Adam that scales the step of each tensor by |p| / |u|.

    Neutral: all parameters excluded.
    """

    lamb_weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay, inside the formula."""
    exclude_from_weight_decay: NameList = Field(default_factory=list)
    """Substrings of parameter names. Matching parameters get neither weight decay nor the trust ratio."""
    always_adapt: bool = False
    """Keep the trust ratio for excluded parameters, as Paddle 2.0 did."""

    neutral: ClassVar[dict[str, Any]] = {"exclude_from_weight_decay": ["weight", "bias"]}
    effect: ClassVar[Effect] = differs("distance", "updates differ in length")
    costs: ClassVar[str] = "time: one pass more than Adam over parameters and moments, for the norms"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        wanted = "torch.optim.Adam or AdamW"
        yield from adoption_problems("lamb", optimizer, (Adam, AdamW), wanted, Lamb, self._own_options)
        yield from parameter_names.problems("lamb", model, optimizer, self.exclude_from_weight_decay)

    @at(
        Stage.UPDATE,
        bars={Fact.SCALED, Fact.SUMMED, Fact.MOMENTUM},
        because="its formula takes moments of the gradient itself",
    )
    def scale(self, optimizer: Optimizer, ctx: SetupContext) -> Optimizer:
        """p - lr * |p| / |u| * u for each tensor, where u is Adam's direction plus decay * p"""
        find = partial(parameter_names.positions, ctx.model, self.exclude_from_weight_decay)
        return adopt(optimizer, Lamb, lambda group: self._own_options(group, find(group["params"])))

    def _own_options(self, group: dict[str, Any], excluded: list[int]) -> dict[str, Any]:
        # A group whose parameters are all excluded is updated as by AdamW, bit for bit.
        adapt = self.always_adapt or len(excluded) < len(group["params"])
        own = {"weight_decay": self.lamb_weight_decay, "adapt": adapt, "always_adapt": self.always_adapt}
        return own | {"excluded": excluded}

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        yield kernels_remark(torch.device("cpu") if ctx is None else ctx.replica_group.device)
