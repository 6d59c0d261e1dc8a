"""paddle.fluid.core: only the exception that scripts catch at the end of an epoch."""

__all__ = ["EOFException"]


class EOFException(Exception):  # noqa: N818  Paddle's name
    """Raised by readers inside a Paddle program. It is never raised here: a loader ends like any iterator."""
