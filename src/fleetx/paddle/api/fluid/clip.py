"""paddle.fluid.clip."""

from __future__ import annotations

from fleetx.paddle.not_covered import not_covered
from fleetx.paddle.static.regularization import ClipByGlobalNorm as GradientClipByGlobalNorm

__all__ = ["GradientClipByGlobalNorm"]

__getattr__ = not_covered(__name__)
