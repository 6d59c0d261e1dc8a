"""Run Paddle scripts: under fleetrun, as a user starts them, or in the pool of ranks, which costs no new processes."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import fleetx
import forked_command
from fleetx.paddle.static import imports

PACKAGES = str(Path(fleetx.__file__).parents[1])


def fleetrun(where: Path, script: str, *arguments: str, options: tuple[str, ...] = ("--nproc_per_node", "2")) -> str:
    """Run a script to its end, which must be a success. Return what worker 0 and fleetrun printed."""
    (where / "train.py").write_text(script)
    names = ("FLEETX_DEVICE", "FLEETX_CACHE", "TRANSFORMERS_OFFLINE", "HF_HUB_OFFLINE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FLEETX_") or k in names}
    env = {**kept, "PYTHONPATH": PACKAGES}
    run = forked_command.fleetrun([*options, "train.py", *arguments], cwd=where, env=env)
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def in_ranks(ranks: Any, where: Path, script: str) -> str:
    """Run a script in every rank of the pool. Return what rank 0 printed."""
    printed: list[str] = ranks.run(_run, str(where), script)
    return printed[0]


def _run(where: str, script: str) -> str:
    text, argv = io.StringIO(), sys.argv
    imports.install()
    sys.argv = ["train.py"]
    try:
        with chdir(where), redirect_stdout(text), redirect_stderr(text):
            exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})
    finally:
        sys.argv = argv
        uninstall()
    return text.getvalue()


def uninstall() -> None:
    """Leave the process as it was: without `paddle`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, imports.Finder)]
    spawn.get_preparation_data = imports._get_preparation_data
    for name in [name for name in sys.modules if name.partition(".")[0] in ("paddle", "fleet_lightning")]:
        del sys.modules[name]


def costs(text: str) -> list[float]:
    """The losses that a script printed as `stepN cost = ...`, and not its `total time cost`."""
    return [float(cost) for cost in re.findall(r"step\d+ cost = ([\d.]+)", text)]


def falls(losses: list[float], *, some: int = 5) -> bool:
    assert len(losses) >= 2 * some
    return sum(losses[-some:]) < sum(losses[:some])
