"""Scripts under fleetrun, as a user starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import fleetx

SECONDS = 150
PACKAGES = str(Path(fleetx.__file__).parents[1])


def fleetrun(where: Path, script: str, *arguments: str, options: tuple[str, ...] = ("--nproc_per_node", "2")) -> str:
    """Run it to its end, which must be a good one; what worker 0 printed, and fleetrun."""
    (where / "train.py").write_text(script)
    names = ("FLEETX_DEVICE", "FLEETX_CACHE", "TRANSFORMERS_OFFLINE", "HF_HUB_OFFLINE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FLEETX_") or k in names}
    run = subprocess.run(
        [sys.executable, "-m", "fleetx.launch", *options, "train.py", *arguments],
        cwd=where, env={**kept, "PYTHONPATH": PACKAGES}, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def costs(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"cost = ([\d.]+)", text)]


def falls(losses: list[float], *, some: int = 5) -> bool:
    assert len(losses) >= 2 * some
    return sum(losses[-some:]) < sum(losses[:some])
