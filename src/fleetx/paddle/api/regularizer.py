"""paddle.regularizer."""

from fleetx.paddle.static.regularization import L2Decay

__all__ = ["L2Decay"]
