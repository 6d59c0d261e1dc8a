"""paddle.fluid.clip."""

from __future__ import annotations

from fleetx.static.clips import ClipByGlobalNorm as GradientClipByGlobalNorm
from fleetx.static.covered import not_covered

__all__ = ["GradientClipByGlobalNorm"]

__getattr__ = not_covered(__name__)
