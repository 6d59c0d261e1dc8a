"""Ranks that save or load do each phase together: if one fails, all of them raise its error."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetx.comm.world import World
from fleetx.errors import CheckpointError, FleetxError, UsageError


def together(world: World, folder: Path, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank. Returns the results, which must be JSON, by rank. A collective, even after an error."""
    failure: Exception | None = None
    result: Any = None
    try:
        result = work()
    except OSError as error:
        failure = CheckpointError(error.filename or folder, _reason(error))
        failure.__suppress_context__ = True  # that says it all
    except Exception as error:  # the others must not wait for this rank
        failure = error
    answers = world.gather_json([_described(failure, folder), result if failure is None else None])
    if failure is not None:
        raise failure
    for rank, (problem, _) in enumerate(answers):
        if problem is not None:
            kind, file, reason = problem
            if kind == "usage":
                raise UsageError(f"rank {rank}: {reason}")
            raise CheckpointError(file, f"{reason} (rank {rank})")
    return [value for _, value in answers]


def on_first(world: World, folder: Path, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 only. Every rank gets its result."""
    return together(world, folder, work if world.rank == 0 else lambda: None)[0]


def _reason(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{reason}: make room there, or keep fewer checkpoints; the older ones are intact"
    return reason


def _described(failure: Exception | None, folder: Path) -> list[str] | None:
    if failure is None:
        return None
    if isinstance(failure, CheckpointError):
        return ["checkpoint", failure.file, failure.reason]
    if isinstance(failure, FleetxError):
        return ["usage", "", str(failure)]
    return ["checkpoint", str(folder), f"{type(failure).__name__}: {failure}"]
