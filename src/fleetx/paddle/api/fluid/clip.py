"""paddle.fluid.clip."""

from fleetx.paddle.static.regularization import ClipByGlobalNorm as GradientClipByGlobalNorm
from fleetx.paddle.static.regularization import set_gradient_clip

__all__ = ["GradientClipByGlobalNorm", "set_gradient_clip"]
