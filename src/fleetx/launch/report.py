"""The failure report: which worker failed first, and how."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetx.launch.job import Job
from fleetx.launch.logs import Logs, tail
from fleetx.launch.workers import RUNNER, LocalWorkers, Worker

# torch's errors on a rank whose peer is gone: never the cause if there is another failure. If fleetx watched the ranks,
# the record itself says that an error follows another rank's.
_LOST_PEER = re.compile(
    r"gloo/(transport|rendezvous)|Connection (closed|reset) by peer|Dist(Network|Store|Backend)Error|nccl\w+Error"
    r"|remote process exited|TCPStore|Application timeout caused pair closure"
)
_MAX_LINES = 30  # of a traceback; the rest is in the log


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One worker that failed. Nodes exchange these as JSON."""

    rank: int
    node: int
    attempt: int
    exit_code: int  # negative: the signal
    time: float  # of the exception, or of the exit if there was none
    error: str  # last line of the traceback; empty if there was no exception
    traceback: str
    tail: list[str]  # last lines of the log, if there is no traceback
    log: str
    secondary: bool  # it only lost its peers, or was being stopped

    def summary(self) -> str:
        return f"rank {self.rank}: {self.reason()}"

    def reason(self) -> str:
        code = _describe(self.exit_code)
        return f"{_clip(self.error)} ({code})" if self.error else code


def failures_of(workers: LocalWorkers, *, job: Job, logs: Logs) -> list[Failure]:
    """The workers of this node that failed, the most likely cause first."""
    failures = (_failure_of(worker, workers=workers, job=job, logs=logs) for worker in workers)
    return first_cause_first(failure for failure in failures if failure)


def first_cause_first(failures: Iterable[Failure]) -> list[Failure]:
    """Sort by attempt; within an attempt, primary failures come before secondary ones, then by time."""
    return sorted(failures, key=lambda failure: (failure.attempt, failure.secondary, failure.time, failure.rank))


def _failure_of(worker: Worker, *, workers: LocalWorkers, job: Job, logs: Logs) -> Failure | None:
    # A record counts even if the process is still running: it can take a while to exit after an exception, and a peer
    # that lost its connection may exit sooner.
    record = _read(worker.record) or (_read(worker.error_file) if worker.exit_code else None)
    stopped_at = workers.stopped_at or float("inf")
    ours: dict[str, Any] = {}
    if record:
        ours = record.get("fleetx", {})
        message: dict[str, Any] = record["message"]
        if not isinstance(message, dict):  # an older format of torchelastic
            message = {"message": str(message)}
        extra = message.get("extraInfo", {})
        error, traceback = str(message.get("message", "")), str(extra.get("py_callstack", ""))
        time = float(ours.get("time", extra.get("timestamp", 0)))
        exit_code = int(ours.get("exit_code", worker.exit_code or 1))
        if ours.get("kind") == "SystemExit":
            error = f"sys.exit({error.removeprefix('SystemExit').removeprefix(': ')}){_location(traceback)}"
    elif worker.exit_code and worker.exit_time <= stopped_at:
        error, traceback, time, exit_code = "", "", worker.exit_time, worker.exit_code
    else:
        return None
    log = logs.path(worker.local_rank)
    return Failure(
        rank=workers.attempt.first_rank + worker.local_rank,
        node=job.rank,
        attempt=workers.attempt.number,
        exit_code=exit_code,
        time=time,
        error=error,
        traceback=traceback,
        tail=[] if traceback else [line for line in tail(log, lines=12) if str(RUNNER) not in line],
        log=str(log),
        secondary=time > stopped_at or bool(ours.get("follows")) or bool(_LOST_PEER.search(traceback)),
    )


def _read(path: Path) -> dict | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record if "message" in record else None
    except (OSError, ValueError, TypeError):
        return None


def _location(traceback: str) -> str:
    """` at file:line` of the innermost frame."""
    frames = re.findall(r'File "(.+?)", line (\d+)', traceback)
    return f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""


def _describe(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def _clip(text: str, *, width: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."


def failure_report(failures: Sequence[Failure], *, job: Job) -> str:
    """The first failure in full, and one line for each of the others. `failures` must be sorted."""
    first, *rest = failures
    node = "" if job.single_node else f" on node {first.node}"
    attempts = f" in attempt {first.attempt + 1} of {rest[-1].attempt + 1}" if rest and rest[-1].attempt else ""
    lines = [f"fleetrun: rank {first.rank}{node} failed first{attempts}: {first.reason()}"]
    if first.traceback:
        lines += [f"    {line}" for line in _shorten(first.traceback.rstrip().splitlines())]
    elif first.tail:
        lines += ["  end of its log:", *(f"    {line}" for line in first.tail)]
    if first.exit_code == -signal.SIGKILL:
        lines.append("  if you did not send this signal, the kernel may have run out of memory: see `dmesg`")
    lines.append(f"  log: {first.log}")
    same = [failure for failure in rest if failure.attempt == first.attempt]
    lines += [f"  then {failure.summary()}" for failure in same[:3]]
    if len(same) > 3:
        lines.append(f"  and {len(same) - 3} more")
    first_of_later = {failure.attempt: failure for failure in reversed(rest) if failure.attempt != first.attempt}
    lines += [f"  attempt {number + 1}: {first_of_later[number].summary()}" for number in sorted(first_of_later)]
    return "\n".join(lines)


def _shorten(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_LINES:
        return lines
    head, end = 6, _MAX_LINES - 7
    return [*lines[:head], f"... {len(lines) - head - end} lines omitted, see the log ...", *lines[-end:]]
