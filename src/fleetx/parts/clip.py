from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from fleetx.base import seams
from fleetx.engine.context import StepContext
from fleetx.strategy.effect import Effect, less
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class Clip(Part):
    """Clip the 2-norm of the full gradient, after unscaling and averaging.

    g <- g * min(1, clip_norm / (|g| + 1e-6)), the formula of torch.nn.utils.clip_grad_norm_.
    Neutral: clip_norm=inf.
    """

    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0
    """Maximum norm of the gradient."""

    dense: ClassVar[bool] = True
    neutral: ClassVar[dict[str, float]] = {"clip_norm": float("inf")}
    effect: ClassVar[Effect] = less("gradient_norm", "the gradient is shorter")
    example: ClassVar[dict[str, float]] = {"clip_norm": 0.01}
    costs: ClassVar[str] = "time: two passes over the gradients, for the norm and for the scaling"

    @at(
        Stage.GRADIENT,
        bars={Fact.SCALED, Fact.SUMMED, Fact.MOMENTUM, Fact.SPREAD},
        because="their norm is not that of the gradient",
        makes={Fact.CHANGED, Fact.CLIPPED},
    )
    def shrink(self, grads: list[Tensor], ctx: StepContext) -> None:
        """limit the norm of the gradient to clip_norm"""
        norm = ctx.norm(grads)
        if not grads:  # this rank left out its batch, and others may wait for the norm
            return
        factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        # A tensor, not a float, so that the host does not wait for the device.
        if all(g.device == factor.device for g in grads):
            seams.foreach_mul_(grads, factor)
        else:
            for g in grads:
                g.mul_(factor.to(g.device))
