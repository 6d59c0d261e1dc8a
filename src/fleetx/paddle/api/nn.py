"""paddle.nn: of all its names, the clipping of gradients."""

from __future__ import annotations

from fleetx.static.clips import ClipByGlobalNorm as ClipGradByGlobalNorm
from fleetx.static.covered import not_covered

__all__ = ["ClipGradByGlobalNorm"]

__getattr__ = not_covered(__name__)
