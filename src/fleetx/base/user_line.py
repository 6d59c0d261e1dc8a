"""The user's line (the innermost one outside fleetx and torch), and warnings that point to it."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from traceback import walk_stack
from types import FrameType
from typing import Any

SourceLine = tuple[str, int]  # a file, and a line in it

_FLEETX = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Not the script: file names of Python's frozen modules begin with "<"; contextlib calls the functions it decorates.
_BETWEEN = (_FLEETX, "<", str(contextlib.__file__))


def user_line() -> SourceLine | None:
    """The line that the script is running; None if there is none, for example while Python exits."""
    frame = user_frame(sys._getframe())
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None


def warn(message: str, *, line: SourceLine | None = None) -> None:
    """Warn at the user's line, or at `line` if no line of the script is running."""
    frame = user_frame(sys._getframe())
    seen: dict[Any, Any] | None = None  # the registry with which Python shows a warning once per line
    if frame is not None:
        line, seen = (frame.f_code.co_filename, frame.f_lineno), frame.f_globals.setdefault("__warningregistry__", {})
    file, number = line or ("fleetx", 0)
    warnings.warn_explicit(message, UserWarning, file, number, registry=seen)


def user_frame(frame: FrameType) -> FrameType | None:
    """The innermost frame of the script, among this frame and its callers."""
    return next((each for each, _ in walk_stack(frame) if is_users(each)), None)


def is_users(frame: FrameType) -> bool:
    torch = sys.modules.get("torch")
    inside = _BETWEEN if torch is None else (*_BETWEEN, os.path.dirname(str(torch.__file__)) + os.sep)
    return not frame.f_code.co_filename.startswith(inside)
