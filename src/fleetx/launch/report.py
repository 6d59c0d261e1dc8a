"""What went wrong first."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleetx.launch.job import Job
from fleetx.launch.logs import Logs, tail
from fleetx.launch.workers import RUNNER, Crew, Worker

# How a rank speaks whose peer has gone: a failure that says so is never the cause if there is another one.
_LOST_PEER = re.compile(
    r"gloo/(transport|rendezvous)|Connection (closed|reset) by peer|Dist(Network|Store|Backend)Error|nccl\w+Error"
    r"|remote process exited|TCPStore|Application timeout caused pair closure"
)
_LINES = 30  # of a traceback; the rest is in the log


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One worker that failed. Goes between nodes as JSON."""

    rank: int
    node: int
    attempt: int
    exit_code: int  # negative: the signal
    time: float  # of the exception or, without one, of the end
    what: str  # last line of the exception; empty without one
    traceback: str
    tail: tuple[str, ...]  # last lines of the log, where there is no traceback
    log: str
    follows: bool  # it only lost its peers, or was being stopped

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        values = json.loads(text)
        return cls(**{**values, "tail": tuple(values["tail"])})

    def brief(self) -> str:
        """Who and how, on one line."""
        if self.what:
            return f"rank {self.rank}: {_clip(self.what)} ({_code(self.exit_code)})"
        return f"rank {self.rank}: {_code(self.exit_code)}"


def failures_of(crew: Crew, *, job: Job, logs: Logs) -> list[Failure]:
    """The workers of this node that failed, the likeliest cause first."""
    found = [failure for worker in crew.workers if (failure := _failure_of(worker, crew=crew, job=job, logs=logs))]
    return in_order(found)


def in_order(failures: Iterable[Failure]) -> list[Failure]:
    """By attempt; within one, what only follows comes last, and the earlier of two failures is the cause."""
    return sorted(failures, key=lambda failure: (failure.attempt, failure.follows, failure.time, failure.rank))


def _failure_of(worker: Worker, *, crew: Crew, job: Job, logs: Logs) -> Failure | None:
    # A record counts even if the process has not ended by itself: an exception may take its time to end a process,
    # and a peer that loses its connection meanwhile may be gone sooner.
    end = worker.end
    record = _read(worker.record) or (_read(worker.error_file) if end and end.exit_code else None)
    stopped_at = crew.stopped_at or float("inf")
    if record:
        ours = record.get("fleetx", {})
        message: dict[str, Any] = record["message"]
        if not isinstance(message, dict):  # torchelastic has a second, older form
            message = {"message": str(message)}
        extra = message.get("extraInfo", {})
        what, traceback = str(message.get("message", "")), str(extra.get("py_callstack", ""))
        moment = float(ours.get("time", extra.get("timestamp", 0)))
        exit_code = int(ours.get("exit_code", end.exit_code if end else 1))
        if ours.get("kind") == "SystemExit":
            what = f"sys.exit({what.removeprefix('SystemExit').removeprefix(': ')}){_place(traceback)}"
    elif end and end.exit_code != 0 and end.time <= stopped_at:
        what, traceback, moment, exit_code = "", "", end.time, end.exit_code
    else:
        return None
    log = logs.path(worker.local_rank)
    return Failure(
        rank=job.rank * job.workers + worker.local_rank,
        node=job.rank,
        attempt=crew.world.attempt,
        exit_code=exit_code,
        time=moment,
        what=what,
        traceback=traceback,
        tail=() if traceback else tuple(line for line in tail(log, lines=12) if str(RUNNER) not in line),
        log=str(log),
        follows=moment > stopped_at or bool(_LOST_PEER.search(traceback)),
    )


def _read(path: Path) -> dict | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record if "message" in record else None
    except (OSError, ValueError, TypeError):
        return None


def _place(traceback: str) -> str:
    """at file:line of the innermost frame."""
    frames = re.findall(r'File "(.+?)", line (\d+)', traceback)
    return f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""


def _code(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def _clip(text: str, *, width: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."


def message(failures: Sequence[Failure], *, job: Job) -> str:
    """The first cause, whole; of what came after it, a line each. `failures` are in order."""
    cause, *rest = failures
    where = "" if job.alone else f" on node {cause.node}"
    tries = f" in attempt 1 of {rest[-1].attempt + 1}" if rest and rest[-1].attempt else ""
    lines = [f"fleetrun: the first cause{where}{tries} is {cause.brief()}"]
    if cause.traceback:
        lines += [f"    {line}" for line in _shortened(cause.traceback.rstrip().splitlines())]
    elif cause.tail:
        lines += ["  the end of its log:", *(f"    {line}" for line in cause.tail)]
    if cause.exit_code == -signal.SIGKILL:
        lines.append("  nobody sent that signal? then it was likely the kernel, out of memory: see `dmesg`")
    lines.append(f"  its log: {cause.log}")
    same = [failure for failure in rest if failure.attempt == cause.attempt]
    lines += [f"  after it, {failure.brief()}" for failure in same[:3]]
    if len(same) > 3:
        lines.append(f"  and {len(same) - 3} more")
    first_of_later = {failure.attempt: failure for failure in reversed(rest) if failure.attempt != cause.attempt}
    lines += [f"  attempt {number + 1}: {first_of_later[number].brief()}" for number in sorted(first_of_later)]
    return "\n".join(lines)


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= _LINES:
        return lines
    head, end = 6, _LINES - 7
    return [*lines[:head], f"... {len(lines) - head - end} lines, all of them in the log ...", *lines[-end:]]
