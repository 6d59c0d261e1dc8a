"""paddle.fluid.core: only the exception that scripts catch at the end of an epoch."""

from __future__ import annotations

from fleetx.paddle.not_covered import not_covered

__all__ = ["EOFException"]

__getattr__ = not_covered(__name__)


class EOFException(Exception):  # noqa: N818  Paddle's name
    """Raised by readers inside a Paddle program. It is never raised here: a loader ends like any iterator."""
