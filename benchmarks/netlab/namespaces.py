"""Namespaces by names that tell whose they are, so that what a killed process left behind can be found and removed."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.frame import CannotRunError

FOLDER = Path("/var/run/netns")  # where iproute2 keeps them
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # sbin is not on everybody's path
KILL_SECONDS = 5.0
_numbers = itertools.count()


def missing() -> str:
    """What must be there before anything can be tried; empty if it is."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [name for name in ("ip", "tc") if not shutil.which(name, path=PATH)]:
        return f"{' and '.join(lacking)} not found: apt-get install iproute2"
    return ""


def tool(*words: str, need: str) -> str:
    """Run ip or tc; what it says. If it fails, this machine has no `need`."""
    # In a session of its own: a Ctrl-C is for us, and we still need the tools to tidy up.
    done = subprocess.run(
        words, env=os.environ | {"PATH": PATH}, capture_output=True, text=True, start_new_session=True
    )
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise CannotRunError(f"no {need} here: `{' '.join(words)}` failed: {said}")
    return done.stdout


def new_family() -> str:
    """The beginning of the names of one lab: this process, exactly, and which of its labs."""
    return f"fleetx-{os.getpid()}-{born(os.getpid())}-{next(_numbers)}-"


def of_family(family: str) -> list[str]:
    return [name for name in every() if name.startswith(family)]


def stale() -> list[str]:
    """Those whose process has ended. A number may belong to somebody else by now, but not with the same birth."""
    found = [(name, re.fullmatch(r"fleetx-(\d+)-(\d+)-\d+-\w+", name)) for name in every()]
    return [name for name, parts in found if parts and born(int(parts[1])) != int(parts[2])]


def remove(names: Iterable[str]) -> None:
    """End what runs in them, then delete them."""
    names = list(names)
    for name in names:
        _empty(name)
    for name in names:
        with contextlib.suppress(CannotRunError):  # another lab may be removing the same stale one
            tool("ip", "netns", "del", name, need="way to delete a namespace")
    if left := [name for name in names if (FOLDER / name).exists()]:
        raise RuntimeError(f"could not remove {', '.join(left)}: try `ip netns del`")


def _empty(name: str) -> None:
    deadline = time.monotonic() + KILL_SECONDS
    while (inside := processes(name)) and time.monotonic() < deadline:
        for process in inside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def processes(name: str) -> list[int]:
    try:
        return [int(word) for word in tool("ip", "netns", "pids", name, need="such namespace").split()]
    except CannotRunError:
        return []  # half made, or gone meanwhile


def every() -> list[str]:
    return sorted(path.name for path in FOLDER.iterdir()) if FOLDER.exists() else []


def born(process: int) -> int | None:
    """When a process was started, in ticks since the machine was; None if it is gone, or only its zombie is left."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(fields[18])
