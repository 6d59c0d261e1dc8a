"""paddle.fluid.clip."""

from __future__ import annotations

from fleetx.paddle.not_covered import not_covered
from fleetx.paddle.static.regularization import ClipByGlobalNorm as GradientClipByGlobalNorm
from fleetx.paddle.static.regularization import set_gradient_clip

__all__ = ["GradientClipByGlobalNorm", "set_gradient_clip"]

__getattr__ = not_covered(__name__)
