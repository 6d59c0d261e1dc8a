"""paddle.fluid.incubate: Fleet 1.x."""

from fleetx.paddle.api.fluid.incubate import fleet

__all__ = ["fleet"]
