"""A full disk, and a save of which the n-th call fails, for every n.

python -m benchmarks.chaos.disk calls FOLDER    with shim.so preloaded: each call of a save fails once
python -m benchmarks.chaos.disk full FOLDER     in a mount namespace of its own: a training on a disk that fills up
Both print their result as JSON.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.chaos.training import ROOT, Training, differences, reference

SHIM = Path(__file__).with_name("shim.c")
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "a short write": 0}
DISK = "6m"  # of the small disk; a checkpoint has 100 kB
SECONDS = 900


def each_call() -> dict[str, Any]:
    """Every call of a save fails once, with every error."""
    if shutil.which("gcc") is None:
        return {"skipped": "needs gcc"}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "shim.so"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-w", "-o", library, SHIM, "-ldl"], check=True)
        return _alone([], "calls", Path(folder) / "work", {"LD_PRELOAD": str(library)})


def full_disk() -> dict[str, Any]:
    """A training whose disk is full at some time, and then is not."""
    if os.geteuid() or shutil.which("unshare") is None:
        return {"skipped": "needs root and unshare"}
    with tempfile.TemporaryDirectory() as folder:
        return _alone(["unshare", "--mount", "--propagation", "private"], "full", Path(folder), {})


def _alone(prefix: list[str], what: str, folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])} | variables
    words = [*prefix, sys.executable, "-m", "benchmarks.chaos.disk", what, str(folder)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        return {"broken": done.stderr[-3000:]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# --- in a process of its own ----------------------------------------------------------------------
def _calls(folder: Path) -> dict[str, Any]:
    import torch
    from torch import nn

    from fleetx import fleet
    from fleetx.errors import CheckpointError

    shim = ctypes.CDLL(None)
    fleet.init()
    model, optimizer = fleet.distribute(*_small(torch, nn), fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))

    def train() -> None:
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def values() -> list[bytes]:
        return [t.detach().numpy().tobytes() for t in model.state_dict().values()]

    def outcome(place: Path, old: list[bytes], new: list[bytes]) -> str:
        """What a failed or successful save left."""
        left = [p.name for p in place.parent.iterdir() if p.name not in ("old", "new")]
        if left:
            return f"left {left[0].rpartition('.')[2]}"
        found = fleet.latest(place.parent)
        if found is None:
            return "no checkpoint is left"
        fleet.load(found)
        return "good" if values() in (old, new) else "other values"

    table: dict[str, dict[str, int]] = {}
    for name, number in ERRORS.items():
        for replace in (False, True):
            row: Counter[str] = Counter()
            for n in range(1, 1000):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                fleet.save(folder / "old", step=1)
                old = values()
                train()
                new, place = values(), folder / ("old" if replace else "new")
                shim.chaos_arm(str(folder).encode(), n, number)
                try:
                    fleet.save(place, step=2)
                    raised = "continued"
                except CheckpointError as error:
                    raised = "refused" if "\n" not in str(error) else "refused in several lines"
                except Exception as error:
                    raised = f"raised {type(error).__name__}"
                hit = shim.chaos_failed()
                shim.chaos_disarm()
                if not hit:
                    break
                result = outcome(place, old, new)
                row[raised if result == "good" else f"{raised}, {result}"] += 1
            table[f"{name}{', replacing' if replace else ''}"] = dict(row)
    return {"table": table}


def _small(torch: Any, nn: Any) -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _full(folder: Path) -> dict[str, Any]:
    unbroken = reference(folder / "unbroken", steps=60)
    place = folder / "training"
    (place / "run").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", place / "run"], check=True)
    filler = place / "run" / ".filler"
    first = Training(place, steps=60, restarts=0).start()
    try:
        first.wait(lambda: first.committed() >= 10)
        _fill(filler)
        code = first.finish()
        messages = [text for _, text in first.messages]
        orphans = len(first.orphans())
    finally:
        first.destroy()
    result: dict[str, Any] = {
        "stopped": code == 1, "names the disk": any("No space left" in text for text in messages), "orphans": orphans,
        "message": next((text for text in messages if "failed first" in text), ""),
        "leftovers": [p.name for p in (place / "run").iterdir() if p.name.endswith(".saving")],
        "kept": first.committed() >= 10,
    }  # fmt: skip
    filler.unlink()
    second = Training(place, steps=60, restarts=5).start()
    try:
        result["finished"] = second.finish() == 0
        result["different"] = differences(second, unbroken)[:5]
    finally:
        second.destroy()
    return result


def _fill(path: Path) -> None:
    """Until nothing more fits."""
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    acts: dict[str, Callable[[Path], dict[str, Any]]] = {"calls": _calls, "full": _full}
    print(json.dumps(acts[sys.argv[1]](Path(sys.argv[2]))))
