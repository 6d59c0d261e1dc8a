"""paddle.nn: only gradient clipping is supported."""

from fleetx.paddle.static.regularization import ClipByGlobalNorm as ClipGradByGlobalNorm

__all__ = ["ClipGradByGlobalNorm"]
