"""The errors that fleetx raises on purpose.

FleetxError
├── StrategyError (ValueError)    the strategy is invalid, or its switches conflict; lists all problems at once
├── WorldError (RuntimeError)     the processes cannot form a world: environment, address or rank
├── UsageError (RuntimeError)     the training loop does something that the strategy does not support
├── NumbersError (ArithmeticError)  gradients are not finite, or the ranks hold different parameters
├── VersionError (ImportError)    this torch is too old
├── LaunchError (RuntimeError)    fleetrun cannot start the script
├── DataError (ValueError)        a file or a record does not have the expected format; names the file and line
├── CheckpointError (RuntimeError) a checkpoint is damaged, incomplete or cannot be written; names the file and reason
└── DownloadError (RuntimeError)  a download failed; names the files
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import PathLike, fspath

NOT_BUILT = "is not supported yet"  # marks a limit that more code could lift; other errors say why it can never work
_LIMIT = re.compile(f"{NOT_BUILT}|does not support .* yet")


def may_be_built(problem: str) -> bool:
    """Does this error say that more code could lift the limit?"""
    return bool(_LIMIT.search(problem))


class FleetxError(Exception):
    """Base class of all errors that fleetx raises on purpose."""


class StrategyError(FleetxError, ValueError):
    """The strategy cannot be used as declared. `problems` has one sentence per reason."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        head = f"{len(self.problems)} problems in the strategy:\n" if len(self.problems) > 1 else ""
        bullet = "  - " if head else ""
        super().__init__(head + "\n".join(bullet + p for p in self.problems))


class WorldError(FleetxError, RuntimeError):
    """The processes cannot form a world."""


class UsageError(FleetxError, RuntimeError):
    """The training loop does something that the strategy does not support."""


class NumbersError(FleetxError, ArithmeticError):
    """Gradients are not finite, or the ranks hold different parameters."""


class VersionError(FleetxError, ImportError):
    """This torch is too old."""


class LaunchError(FleetxError, RuntimeError):
    """fleetrun cannot start the script."""


class DataError(FleetxError, ValueError):
    """A file or a record does not have the expected format; the message names the file and line."""


class CheckpointError(FleetxError, RuntimeError):
    """A checkpoint is damaged, incomplete or cannot be written. `file` and `reason` say which file, and why."""

    def __init__(self, file: str | PathLike[str], reason: str):
        self.file, self.reason = fspath(file), reason
        super().__init__(self.file, reason)

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


class DownloadError(FleetxError, RuntimeError):
    """A download failed. `failed` lists the files; it is empty if the error does not concern individual files."""

    def __init__(self, message: str, *, failed: Sequence[str] = ()):
        self.failed = tuple(failed)
        super().__init__(message)
