"""Are the options of a loader or an application what they can be?"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from fleetx.errors import UsageError


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"{name} = {value!r}: must be {' or '.join(map(repr, known))}{hint}")


def check_whole(*, least: int = 1, **numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name} = {value!r}: must be a whole number of at least {least}")


def check_names(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """given: options that `owner` was given, of which some may not be known to it."""
    if unknown := [name for name in given if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise UsageError(f"{owner} has no option {unknown[0]!r}: {hint}")
