"""How long a launcher takes to start its workers."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.frame import CannotRunError, Run, Sides, benchmark, interleave

PAGE = "overhead.md"
WORKERS = 2
SECONDS = 60  # limit for one launch

# time.time, because all processes must use the same clock.
FIRST_LINE = """\
import time; now = time.time()
import os, pathlib
pathlib.Path(__file__).with_name("at." + os.environ["RANK"]).write_text(repr(now))
"""

GROUP = """\
import os, pathlib, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
pathlib.Path(__file__).with_name("at." + os.environ["RANK"]).write_text(repr(time.time()))
dist.destroy_process_group()
"""


@benchmark(ours="fleetrun", theirs="torchrun", goal=1.1, rounds=10, starts=1)
def first_line(run: Run) -> Sides:
    """From the start of the launcher until both workers have reached their first line."""
    return compare(FIRST_LINE, run)


@benchmark(ours="fleetrun", theirs="torchrun", rounds=10, starts=1)
def group(run: Run) -> Sides:
    """From the start of the launcher until two workers have imported torch and formed a process group."""
    return compare(GROUP, run)


def compare(script: str, run: Run) -> Sides:
    if importlib.util.find_spec("fleetx.launch") is None:
        raise CannotRunError("fleetx.launch cannot be imported")
    total: dict[str, list[float]] = {"fleetrun": [], "torchrun": []}

    def fleetrun() -> float:
        options = ["--device", "cpu", "--nproc_per_node", str(WORKERS), "--log_dir", "log"]
        return launched(["fleetx.launch", *options], script=script, total=total["fleetrun"])

    def torchrun() -> float:
        # Its default rendezvous is faster than --standalone, but its default port may be in use.
        options = ["--master_port", str(_free_port()), "--nproc_per_node", str(WORKERS)]
        return launched(["torch.distributed.run", *options], script=script, total=total["torchrun"])

    ours, theirs = interleave(fleetrun, torchrun, rounds=run.rounds, warm_up=1)
    return Sides(ours, theirs, notes={"seconds_until_the_launcher_ended": {k: v[1:] for k, v in total.items()}})


def launched(module: list[str], *, script: str, total: list[float]) -> float:
    """Seconds until the last worker wrote the time. Appends the seconds until the launcher exited to `total`."""
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        folder = Path(name)
        (folder / "script.py").write_text(script)
        start = time.time()
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *module, "script.py"], cwd=folder, stdout=output, stderr=output
            )
            code = _wait(process)
        total.append(time.time() - start)
        if code != 0:
            printed = (folder / "output").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{module[0]} failed with exit code {code}:\n{printed}")
        return max(float((folder / f"at.{rank}").read_text()) for rank in range(WORKERS)) - start


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # lets the launcher stop its workers first
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        raise RuntimeError(f"the launcher did not exit within {SECONDS} s") from None
