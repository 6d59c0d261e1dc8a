"""paddle.fluid.incubate.fleet: only collective training."""

from fleetx.fleet import base
from fleetx.paddle.api.fluid.incubate.fleet import collective

__all__ = ["base", "collective"]
