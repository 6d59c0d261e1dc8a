"""Notices that a person should see once, not once per worker."""

from __future__ import annotations

import sys

from fleetx.comm.roles import from_environment

_said: set[str] = set()


def say_once(text: str) -> None:
    """Print a text once, on the first worker only."""
    if text not in _said and from_environment().rank == 0:
        print(f"fleetx: {text}", file=sys.stderr, flush=True)
    _said.add(text)
