"""paddle.nn: only gradient clipping is supported."""

from __future__ import annotations

from fleetx.paddle.not_covered import not_covered
from fleetx.paddle.static.regularization import ClipByGlobalNorm as ClipGradByGlobalNorm

__all__ = ["ClipGradByGlobalNorm"]

__getattr__ = not_covered(__name__)
