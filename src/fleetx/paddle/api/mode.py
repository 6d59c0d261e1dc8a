"""Paddle's two modes. Programs run in both; for eager training use PyTorch."""

from __future__ import annotations

_static = False


def enable_static(place: object = None) -> None:
    global _static
    _static = True


def in_dynamic_mode() -> bool:
    """True until enable_static is called, as in Paddle 2."""
    return not _static
