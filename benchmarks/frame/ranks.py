"""A function in n real processes: one gloo group on loopback, bounded in time, nothing left over."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.2  # polling more often would slow down what is measured
_LAST_WORDS = 2000


class RankError(RuntimeError):
    """A rank raised, died or took too long."""


def run(
    function: Callable[..., Any],
    *args: Any,
    size: int,
    seconds: float,
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call function(*args) in `size` processes; the results by rank. The function must be importable by its name."""
    variables = {"OMP_NUM_THREADS": str(threads), **(environment or {})}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps((function, args, size, seconds)))
        processes = []
        try:
            for rank in range(size):
                processes.append(_start(folder, rank, variables))
            _wait(processes, folder, seconds)
        finally:
            for process in processes:
                _end(process)
        return [_result(folder, rank) for rank in range(size)]


def _start(folder: Path, rank: int, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
        "FLEETX_DEVICE": "cpu",
        **variables,
    }
    command = [sys.executable, "-m", "benchmarks.frame.rank", str(os.getpid()), str(folder), str(rank)]
    with open(folder / f"output.{rank}", "wb") as output:
        # A session of its own, so that whatever the rank starts can be ended with it.
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while None in (codes := [_code(p) for p in processes]) and not any(codes):
        if time.monotonic() > deadline:
            late = [rank for rank, code in enumerate(codes) if code is None]
            raise RankError(f"ranks {late} took longer than {seconds:g} s")
        time.sleep(_POLL_SECONDS)
    if any(codes):  # those that still run wait for it in a collective
        raise _failure(folder, {rank: code for rank, code in enumerate(codes) if code})


def _code(process: subprocess.Popen[bytes]) -> int | None:
    """How it ended, if it did. It is not reaped, so that its number stays its own until `_end`."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _failure(folder: Path, codes: dict[int, int]) -> Exception:
    """What the first rank that failed raised; the others follow, because they lose their peer."""
    errors = sorted((folder / f"error.{rank}" for rank in codes), key=_written)
    if not errors[0].exists():
        rank = next(iter(codes))
        words = (folder / f"output.{rank}").read_text(errors="replace")[-_LAST_WORDS:]
        return RankError(f"rank {rank} ended with {codes[rank]}:\n{words}")
    raised = pickle.loads(errors[0].read_bytes())
    return raised if isinstance(raised, Exception) else RankError(f"in rank {errors[0].suffix[1:]}:\n{raised}")


def _written(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else float("inf")


def _result(folder: Path, rank: int) -> Any:
    return pickle.loads((folder / f"result.{rank}").read_bytes())


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the whole session: the rank itself may have ended, what it started not
    process.wait()
