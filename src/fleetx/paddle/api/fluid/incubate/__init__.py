"""paddle.fluid.incubate: Fleet 1.x."""

from __future__ import annotations

from fleetx.paddle.api.fluid.incubate import fleet
from fleetx.paddle.not_covered import not_covered

__all__ = ["fleet"]

__getattr__ = not_covered(__name__)
