"""What is wrong with the data, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from fleetx.errors import DataError, UsageError

ON_ERROR = ("raise", "skip")


class Complaints:
    """Records that cannot be used: the first is an error, unless they are to be skipped."""

    def __init__(self, on_error: str):
        check_choice("on_error", on_error, ON_ERROR)
        self.skip = on_error == "skip"
        self.found: list[str] = []

    def add(self, complaint: str) -> None:
        if not self.skip:
            raise DataError(f'{complaint}. on_error="skip" goes on without such records')
        self.found.append(complaint)


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"must be one of {', '.join(map(repr, known))}"
        raise UsageError(f"{name} = {value!r}: {hint}")


def check_whole(*, least: int = 1, **numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name} = {value!r}: must be a whole number, at least {least}")
