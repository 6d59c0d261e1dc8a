"""What a test of the link gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """One stretch of traffic: how long it took, what a program sent, and what the interface counted meanwhile."""

    what: str
    seconds: float
    payload: int  # bytes out of one host
    counted: int  # by the interface of that host

    @property
    def rate(self) -> float:
        """Bits of payload a second."""
        return self.payload * 8 / self.seconds
