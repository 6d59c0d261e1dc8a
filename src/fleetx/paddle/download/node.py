"""One process of a node does the work; the others wait for its outcome, whichever it is.

The lock is the kernel's (flock): it ends with the process that holds it, however that ends. Whoever then gets it and
finds no outcome for itself takes over: one that was written while it waited, or before it came, by its own run.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from fleetx.comm import roles
from fleetx.errors import DownloadError
from fleetx.paddle.download.progress import say
from fleetx.paddle.download.records import Records

_POLL = 0.05
_HEAD_START = 2.0  # seconds in which only the first worker begins: it is the one whose output a person sees
_PATIENT = 5.0  # seconds of waiting before a word about it; then every minute

_calls: Counter[Path] = Counter()  # of this process, by the outcome that they ask for


def is_first_worker() -> bool:
    """Of this node, by the launcher's variables; a process without a launcher is."""
    for variable in ("LOCAL_RANK", "PADDLE_RANK_IN_NODE"):
        if os.environ.get(variable, "").isdecimal():
            return int(os.environ[variable]) == 0
    return roles.from_environment().local_rank == 0


def once_per_node(work: Callable[[], None], records: Records, *, key: str, task: str, first: bool) -> None:
    """Do `work`, or wait while another process does the same `key` and take its outcome, success or error."""
    outcome = records.outcome(key)
    before = records.read(outcome).get("id")
    _calls[outcome] += 1
    run, call = _run(), _calls[outcome]

    def is_ours(told: dict[str, Any]) -> bool:
        same_run = run is not None and told.get("run") == run and told["call"] >= call
        return bool(told) and (same_run or told["id"] != before)

    records.root.mkdir(parents=True, exist_ok=True)
    with records.lock.open("a+") as lock:
        told = _outcome_or_lock(lock, records, outcome, is_ours, task=task, first=first)
        if told is None:
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            _work(work, records, outcome, {"run": run, "call": call})
        elif told["error"]:
            raise DownloadError(
                f"process {told['pid']}, which worked for this node, failed: {told['error']}",
                failed=told["failed"],
            )
        # closing the file gives the lock back


def _run() -> str | None:
    """What the workers of one start have in common; None where no launcher says it (torchrun says "none")."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else f"{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _work(work: Callable[[], None], records: Records, outcome: Path, asked: dict[str, Any]) -> None:
    """An interruption leaves no outcome: the others then take over, unless they are interrupted too."""
    record = {"id": uuid.uuid4().hex, "pid": os.getpid(), **asked, "error": "", "failed": []}
    try:
        work()
    except Exception as error:
        failed = list(error.failed) if isinstance(error, DownloadError) else []
        records.write(outcome, {**record, "error": str(error) or type(error).__name__, "failed": failed})
        raise
    records.write(outcome, record)


def _outcome_or_lock(
    lock: IO[str],
    records: Records,
    outcome: Path,
    is_ours: Callable[[dict[str, Any]], bool],
    *,
    task: str,
    first: bool,
) -> dict[str, Any] | None:
    """Wait for an outcome that another wrote for us, and return it; or for the lock: then there is none."""
    began = time.monotonic()
    speak = began + _PATIENT
    begin = began if first else began + _HEAD_START
    while True:
        now = time.monotonic()
        taken = now >= begin and _try(lock)
        told = records.read(outcome)  # after the lock, before which whoever had it wrote its own
        if is_ours(told):
            return told
        if taken:
            return None
        if now >= speak:
            say(f"waiting for process {records.lock.read_text() or '?'}, which {task}")
            speak = now + 60.0
        time.sleep(_POLL)


def _try(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise DownloadError(
            f"{lock.name}: this file system has no locks ({error.strerror}); use a local_path on another"
        ) from None
    return True
