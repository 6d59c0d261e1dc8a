"""Weight decay and gradient clipping of Paddle's optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleetx.errors import UsageError
from fleetx.paddle.static.programs import script


@dataclass(frozen=True)
class L2Decay:
    """Adds coeff * p to the gradient of p."""

    coeff: float = 0.0


class L2DecayRegularizer(L2Decay):
    """L2Decay with fluid's argument name."""

    def __init__(self, regularization_coeff: float = 0.0):
        super().__init__(regularization_coeff)


@dataclass(frozen=True)
class ClipByGlobalNorm:
    """Becomes `clip` of the strategy."""

    clip_norm: float
    group_name: str = "default_group"

    def __post_init__(self) -> None:
        if self.group_name != "default_group":
            raise UsageError(
                f"group_name = {self.group_name!r}: all gradients are clipped by one global norm, so there is only one "
                "group: remove it"
            )


def set_gradient_clip(clip: Any, param_list: Any = None, program: Any = None) -> None:
    """Clip the gradients of every model that is minimized afterwards, unless its optimizer has a grad_clip."""
    if not isinstance(clip, ClipByGlobalNorm):
        raise UsageError(f"clip = {clip!r}: must be a GradientClipByGlobalNorm")
    if param_list is not None or program is not None:
        raise UsageError("set_gradient_clip clips all gradients by one global norm: remove param_list and program")
    script().clip = clip
