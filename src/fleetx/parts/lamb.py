from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from fleetx.comm.world import World
from fleetx.engine.context import SetupContext, StepContext
from fleetx.optim import Lamb, exclusion
from fleetx.optim import adopt as inner
from fleetx.optim.layerwise import adopt
from fleetx.strategy.part import Names, Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class LAMB(Part):
    """Layer-wise adaptive moments: Adam whose step is scaled by |p| / |u| for each tensor.

    Neutral: every parameter excluded.
    """

    lamb_weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """The weight decay inside of the formula."""
    exclude_from_weight_decay: Names = Field(default_factory=list)
    """Parts of parameter names that get neither decay nor trust ratio."""
    always_adapt: bool = False
    """Keep the trust ratio for excluded parameters too, as Paddle 2.0 did."""

    neutral: ClassVar[dict[str, Any]] = {"exclude_from_weight_decay": ["weight", "bias"]}
    costs: ClassVar[str] = "time: a second pass over parameters and moments than Adam makes, for the norms"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        wanted = "torch.optim.Adam or AdamW"
        yield from inner.problems("lamb", optimizer, (Adam, AdamW), wanted, "lamb_weight_decay", Lamb, self._own)
        if type(optimizer) in (Adam, AdamW) and any(group["amsgrad"] for group in optimizer.param_groups):
            yield "lamb has no amsgrad: pass amsgrad=False to the optimizer"
        yield from exclusion.problems("lamb", model, optimizer, self.exclude_from_weight_decay)

    @at(Stage.UPDATE, bars={Fact.SCALED, Fact.SUMMED, Fact.MOMENTUM})
    def scale(self, optimizer: Optimizer, ctx: SetupContext) -> Optimizer:
        """p - lr * |p| / |u| * u for each tensor, u being Adam's direction plus decay * p"""
        find = partial(exclusion.positions, ctx.model, self.exclude_from_weight_decay)
        return adopt(optimizer, Lamb, lambda group: self._own(group, find(group["params"])))

    def _own(self, group: dict[str, Any], excluded: list[int]) -> dict[str, Any]:
        # A group that is excluded as a whole is AdamW's, bit for bit.
        adapt = self.always_adapt or len(excluded) < len(group["params"])
        own = {"weight_decay": self.lamb_weight_decay, "adapt": adapt, "always_adapt": self.always_adapt}
        return own | {"excluded": excluded}

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        yield inner.path()
