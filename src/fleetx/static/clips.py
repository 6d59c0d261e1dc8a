"""What Paddle puts on an optimizer besides its own formula: regularisation and clipping."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class L2Decay:
    """Adds coeff * p to the gradient of p."""

    coeff: float = 0.0


@dataclass(frozen=True)
class ClipByGlobalNorm:
    """Becomes `clip` of the strategy."""

    clip_norm: float


@dataclass(frozen=True)
class ClipByNorm:
    """Of each tensor alone: becomes the `clip_norm` of dgc."""

    clip_norm: float


Clip = ClipByGlobalNorm | ClipByNorm
