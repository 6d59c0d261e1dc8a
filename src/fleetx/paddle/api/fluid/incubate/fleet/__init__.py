"""paddle.fluid.incubate.fleet: only collective training."""

from __future__ import annotations

from fleetx.fleet import base
from fleetx.paddle.api.fluid.incubate.fleet import collective
from fleetx.paddle.not_covered import not_covered

__all__ = ["base", "collective"]

__getattr__ = not_covered(__name__)
