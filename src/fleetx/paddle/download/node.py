"""Who waits for whom: the processes of a node wait for the one that downloads; with shards, all workers wait for all.

On a node, the outcome is a success or an error. The lock is the kernel's (flock), so it is released when the process
that holds it ends. The next process to get the lock takes over, unless there is already an outcome for it: one written
while it waited, or one that its own run wrote before it started.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from fleetx.base.files import write_atomic
from fleetx.comm import roles
from fleetx.errors import DownloadError, UsageError
from fleetx.paddle.download.progress import say

_POLL = 0.05
_HEAD_START = 2.0  # seconds during which only the first worker may start: people see its output
_SILENT = 5.0  # seconds before the first message about waiting; then one per minute

_calls: Counter[Path] = Counter()  # number of calls in this process, by the path of their outcome


def is_first_worker() -> bool:
    """Whether this is the first worker of the node; always true without a launcher."""
    for variable in ("LOCAL_RANK", "PADDLE_RANK_IN_NODE"):
        if os.environ.get(variable, "").isdecimal():
            return int(os.environ[variable]) == 0
    return roles.from_environment().local_rank == 0


def once_per_node(work: Callable[[], None], folder: Path, *, key: str, task: str, first: bool) -> None:
    """Call `work`, or wait while another process does the task `key` and share its outcome.

    The lock and the outcomes are in `folder`.
    """
    path = folder / "outcomes" / f"{key}.json"
    before = read_record(path).get("id")
    _calls[path] += 1
    run, call = _run_id(), _calls[path]

    def is_ours(outcome: dict[str, Any]) -> bool:
        same_run = run is not None and outcome.get("run") == run and outcome["call"] >= call
        return bool(outcome) and (same_run or outcome["id"] != before)

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as lock:  # closing it releases the lock
        if outcome := _wait(lock, path, is_ours, task=task, first=first):
            if outcome["error"]:
                message = f"{outcome['error']} (in process {outcome['pid']}, which downloads for this node)"
                raise DownloadError(message, failed=outcome["failed"])
            return
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        record = {"id": uuid.uuid4().hex, "pid": os.getpid(), "run": run, "call": call, "error": "", "failed": []}
        try:
            work()
        except Exception as error:  # an interruption leaves no outcome, so that another process takes over
            failed = list(getattr(error, "failed", ()))
            write_record(path, {**record, "error": str(error) or type(error).__name__, "failed": failed})
            raise
        write_record(path, record)


def _run_id() -> str | None:
    """An id that the workers of one launch share; None if the launcher does not set one (torchrun sets "none")."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else f"{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _wait(
    lock: IO[str], path: Path, is_ours: Callable[[dict[str, Any]], bool], *, task: str, first: bool
) -> dict[str, Any] | None:
    """Wait for an outcome that is ours and return it, or for the lock and return None."""
    start = time.monotonic() + (0.0 if first else _HEAD_START)
    report = time.monotonic() + _SILENT
    while True:
        now = time.monotonic()
        locked = now >= start and _try_lock(lock)
        outcome = read_record(path)  # after locking: the last holder wrote it before it released the lock
        if is_ours(outcome):
            return outcome
        if locked:
            return None
        if now >= report:
            say(f"waiting for process {Path(lock.name).read_text() or '?'}, which {task}")
            report = now + 60.0
        time.sleep(_POLL)


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise DownloadError(
            f"{lock.name}: this file system does not support locks ({error.strerror}); use another local_path"
        ) from None
    return True


# --- records: small json files in `.fleetx-download`, fleetx's own folder inside the local one ----------
def read_record(path: Path) -> dict[str, Any]:
    """Read a record; an empty one if there is none or it is damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(record))


# --- all workers, because a list may name files of every shard -----------------------------------
def with_all_workers(work: Callable[[], None]) -> None:
    """Call `work` on every worker and wait for the others. If it fails anywhere, every worker gets the error."""
    world = _world()
    if world is None:
        return work()
    error: BaseException | None = None
    try:
        work()
    except BaseException as failure:  # whatever it is: the others are waiting for this worker
        error = failure
    errors = world.gather_json("" if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    for rank, message in enumerate(errors):
        if message:
            raise DownloadError(f"the shard of worker {rank} failed: {message}")
    return None


def _world() -> Any:
    """The world of fleet.init; None if this worker is alone."""
    session = sys.modules.get("fleetx.comm.session")  # not imported here: downloading does not need torch
    world = session.current().world if session is not None else None
    if world is None and (size := roles.from_environment().size) > 1:
        raise UsageError(
            f"shard_num: a sharded download waits for the shards of all {size} workers: call fleet.init() before it"
        )
    return world if world is not None and world.size > 1 else None
