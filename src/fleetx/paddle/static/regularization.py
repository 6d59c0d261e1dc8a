"""Weight decay and gradient clipping of Paddle's optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from fleetx.errors import UsageError


@dataclass(frozen=True)
class L2Decay:
    """Adds coeff * p to the gradient of p."""

    coeff: float = 0.0


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


Clip = ClipByGlobalNorm
