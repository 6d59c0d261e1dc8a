"""Checks for the options of loaders and applications, and for the records that a loader reads."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from fleetx.base.suggest import did_you_mean
from fleetx.errors import DataError, UsageError

ON_ERROR = ("raise", "skip")  # what to do about invalid records


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        hint = did_you_mean(value, known, cutoff=0.5)
        raise UsageError(f"{name} = {value!r}: must be {' or '.join(map(repr, known))}{hint and '; ' + hint}")


def check_int(*, least: int = 1, **numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name} = {value!r}: must be an integer, at least {least}")


def check_fraction(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value < 1:
            raise UsageError(f"{name} = {value!r}: must be at least 0 and less than 1")


def check_names(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise an error if any option in `given` is not in `known`."""
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known, otherwise=f"its options are {', '.join(known)}")
            raise UsageError(f"{owner} has no option {name!r}: {hint}")


def listed_paths(filelist: Path) -> list[Path]:
    """The files named in a list, relative to its folder: the first word of each line."""
    try:
        text = filelist.read_text(encoding="utf-8-sig")  # sig: Windows editors write a BOM
    except OSError as error:
        raise DataError(f"cannot read the file list {filelist}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise DataError(f"the file list {filelist} is not UTF-8 text") from None
    return [filelist.parent / line.split()[0] for line in text.splitlines() if line.strip()]


class RecordErrors:
    """Raises an error for the first invalid record, or collects messages if on_error is "skip"."""

    def __init__(self, on_error: str):
        check_choice("on_error", on_error, ON_ERROR)
        self.skip = on_error == "skip"
        self.messages: list[str] = []

    def add(self, *messages: str) -> None:
        if messages and not self.skip:
            raise DataError(f'{messages[0]}. To leave out invalid records, pass on_error="skip"')
        self.messages += messages


def optional(module: str, who_needs_what: str) -> Any:
    """Import a module that fleetx does not require; if it is missing, raise an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{who_needs_what}: pip install 'fleetx[applications]'") from error
