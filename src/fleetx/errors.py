"""Every error that fleetx raises on purpose.

FleetxError
├── StrategyError (ValueError)    the declared strategy is wrong or cannot be composed; lists all problems at once
├── WorldError (RuntimeError)     the processes cannot form a world: environment, address, rank
├── UsageError (RuntimeError)     the training loop does something that the strategy cannot honour
├── LaunchError (RuntimeError)    fleetrun cannot start what was asked for
├── DataError (ValueError)        a file or a record is not what its format asks for; names file and line
└── DownloadError (RuntimeError)  data could not be brought here; names the files
"""

from __future__ import annotations

from collections.abc import Sequence


class FleetxError(Exception):
    """The root of the tree: catch it to catch everything that fleetx raises on purpose."""


class StrategyError(FleetxError, ValueError):
    """What was declared cannot happen as declared. `problems` has one sentence for each reason."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        head = f"{len(self.problems)} problems in the strategy:\n" if len(self.problems) > 1 else ""
        bullet = "  - " if head else ""
        super().__init__(head + "\n".join(bullet + p for p in self.problems))


class WorldError(FleetxError, RuntimeError):
    """The processes cannot form a world."""


class UsageError(FleetxError, RuntimeError):
    """The training loop does something that the strategy cannot honour."""


class LaunchError(FleetxError, RuntimeError):
    """fleetrun cannot start what was asked for."""


class DataError(FleetxError, ValueError):
    """A file or a record is not what its format asks for; the message names file and line."""


class DownloadError(FleetxError, RuntimeError):
    """Data could not be brought here. `failed` names the files, where single files failed."""

    def __init__(self, sentence: str, *, failed: Sequence[str] = ()):
        self.failed = tuple(failed)
        super().__init__(sentence)
