"""paddle.regularizer."""

from __future__ import annotations

from fleetx.paddle.not_covered import not_covered
from fleetx.paddle.static.regularization import L2Decay

__all__ = ["L2Decay"]

__getattr__ = not_covered(__name__)
