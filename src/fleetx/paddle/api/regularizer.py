"""paddle.regularizer."""

from __future__ import annotations

from fleetx.static.clips import L2Decay
from fleetx.static.covered import not_covered

__all__ = ["L2Decay"]

__getattr__ = not_covered(__name__)
