"""Run all sides and measure their differences."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.paddle_agreement import formulas, ours
from benchmarks.paddle_agreement.cases import CASES, Arrays, Case
from fleetx.optim import schedule

SCRIPT = Path(__file__).with_name("paddle_side.py")
RATE, WARMUP, TOTAL = 0.5, 12, 30  # for linear_warmup_decay


class PaddleSideError(Exception):
    """The other interpreter failed; the message is its error output."""


@dataclass(frozen=True)
class Row:
    """The largest differences over all parameters, steps and kernels, relative to how far the parameter moved."""

    case: Case
    paddle_formula: float
    ours_formula: float
    ours_paddle: float

    def agrees(self, tolerance: float) -> bool:
        """If Paddle is known to differ, ours must match the formula and Paddle must not."""
        if self.case.differs:
            return self.ours_formula <= tolerance < self.paddle_formula
        return max(self.paddle_formula, self.ours_formula, self.ours_paddle) <= tolerance


def distance(a: Arrays, b: Arrays) -> float:
    """max |a - b| relative to how far b moved from its start, so that large parameters do not hide small steps."""
    worst = 0.0
    for name in b:
        x, y = (v.astype(np.float64).reshape(len(v), -1) for v in (a[name], b[name]))
        if not np.isfinite(x).all() or not np.isfinite(y).all():
            return float("inf")
        difference, moved = np.linalg.norm(x - y, axis=1).max(), np.linalg.norm(y - y[0], axis=1).max()
        if difference:
            worst = max(worst, float(difference / moved) if moved else float("inf"))
    return worst


def run(python: Path, folder: Path, steps: int) -> tuple[str, list[Row], float]:
    """The version of Paddle, one row per case, and the largest difference of linear_warmup_decay."""
    _write(folder, steps)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2"}
    done = subprocess.run([python, SCRIPT, folder], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise PaddleSideError(done.stderr.strip()[-2000:] or f"exit code {done.returncode}")
    rows = []
    for i, case in enumerate(CASES):
        theirs, formula = dict(np.load(folder / f"{i}.out.npz")), formulas.run(case, steps)
        own = [ours.run(case, steps, kernels) for kernels in ours.kernels()]
        worst = [max(distance(o, other) for o in own) for other in (formula, theirs)]
        rows.append(Row(case, distance(theirs, formula), *worst))
    return (folder / "version").read_text(), rows, _rate_difference(dict(np.load(folder / "rates.npz")))


def _write(folder: Path, steps: int) -> None:
    for i, case in enumerate(CASES):
        starts = {f"{n}.start": v for n, v in case.starts().items()}
        gradients = {f"{n}.gradient": v for n, v in case.gradients(steps).items()}
        np.savez(folder / f"{i}.npz", rates=case.learning_rates(steps), **starts, **gradients)
    cases = [asdict(c) | {"names": list(c.starts()), "excluded": list(c.excluded)} for c in CASES]
    (folder / "cases.json").write_text(json.dumps(cases))
    (folder / "rates.json").write_text(json.dumps({"steps": TOTAL + 5, "rate": RATE, "total": TOTAL}))


def _rate_difference(theirs: Arrays) -> float:
    rate = schedule.linear_warmup_decay(RATE, WARMUP, TOTAL)
    t = theirs["counter"]
    want = np.where(t < WARMUP, RATE * t / WARMUP, theirs["decayed"])
    return float(np.abs(want - [rate(i) for i in range(len(t))]).max() / RATE)
