"""A rank that stops without ending, and a network that is cut. Short ones must be borne, long ones be told."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.chaos.marks import now
from benchmarks.chaos.training import Training, disagreements

BORNE = {"stopped": 4.0, "cut": 1.0}  # seconds that must not be taken for a failure
ENDLESS = 10**9  # steps
CUT = 12.0  # seconds that a link is cut for; long enough to be noticed
NAMESPACE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def stalls(*, count: int, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One training each: stopped ranks, and cut links if this machine allows a network namespace."""
    yield _stall("stopped", count, tell)
    if os.geteuid() or not all(map(shutil.which, ("unshare", "ip", "nsenter"))):
        yield {"kind": "cut", "skipped": "needs root, unshare, nsenter and ip"}
    else:
        yield _stall("cut", count, tell)


def _stall(kind: str, count: int, tell: Callable[[str], None]) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    result: dict[str, Any] = {"kind": kind, "borne": 0, "false_alarms": [], "stalls": [], "hangs": [], "orphans": 0}
    prefix = NAMESPACE if kind == "cut" else ()
    training = Training(folder, steps=ENDLESS, prefix=prefix).start()
    try:
        for number in range(count):
            _further(training, steps=15)
            before = len(training.messages)
            _do(training, kind, number, BORNE[kind])
            _further(training, steps=15)
            result["borne"] += 1
            result["false_alarms"] += [text for _, text in training.messages[before:]]
            result["stalls"].append(_one(training, kind, number))
            tell(f"{kind}: {number + 1} of {count}")
        training.process.send_signal(signal.SIGTERM)
        result["sigterm"] = {"code": training.process.wait(60), "saved": training.committed() == _done(training)}
        result["orphans"] = len(training.orphans())
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        result["hangs"].append(f"{error}; {[text for _, text in training.messages[-5:]]}")
    finally:
        training.destroy()
    result["different"] = disagreements(training)[:5]
    shutil.rmtree(folder, ignore_errors=True)
    return result


def _done(training: Training) -> int:
    return training.lines(0)[-1].step


def _further(training: Training, *, steps: int) -> None:
    """Wait until it has made this many steps from now on."""
    begin, pid = training.read(0).step, training.read(0).pid

    def there() -> bool:
        mark = training.read(0)
        return mark.step >= begin + steps if mark.pid == pid else mark.step > 0 and mark.phase == "step"

    if not training.wait(there):
        raise TimeoutError(f"fleetrun ended: {[text for _, text in training.messages[-5:]]}")


def _do(training: Training, kind: str, number: int, seconds: float) -> None:
    """Stall for some seconds."""
    if kind == "cut":
        _link(training, "down")
        time.sleep(seconds)
        _link(training, "up")
    else:
        pid = training.read(number % training.ranks).pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


def _one(training: Training, kind: str, number: int) -> dict[str, Any]:
    """Stall until it is noticed; how long it took to a message and to the next step."""
    pids, before, at = [training.read(r).pid for r in range(training.ranks)], len(training.messages), now()
    if kind == "cut":
        _link(training, "down")
        time.sleep(CUT)
        _link(training, "up")
    else:
        os.kill(pids[number % training.ranks], signal.SIGSTOP)
    mended = now()
    training.wait(lambda: training.read(0).pid != pids[0] and training.read(0).step > 0)
    told = training.messages[before:]
    step = next(line.time for line in reversed(training.lines(0)) if line.what == "resumed")
    return {
        "to_message": round(told[0][0] - at, 3) if told else None, "message": told[0][1] if told else "",
        "to_step": round(step - (mended if kind == "cut" else at), 3),
    }  # fmt: skip


def _link(training: Training, state: str) -> None:
    words = ["nsenter", "--net", "--target", str(training.process.pid), "ip", "link", "set", "lo", state]
    subprocess.run(words, check=True, timeout=60)
