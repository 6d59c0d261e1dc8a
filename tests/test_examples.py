"""Every example runs, as its first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def fleetrun(*args, cwd):
    command = [sys.executable, "-m", "fleetx.launch", "--device", "cpu", "--nproc_per_node", "2", *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=150)


def test_digits_trains_with_two_workers_and_reports_its_accuracy(tmp_path):
    done = fleetrun(ROOT / "examples" / "digits.py", "--epochs", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "requested: clip, gradient_merge, recompute, sync_batch_norm" in done.stdout
    found = [float(a) for a in re.findall(r"test accuracy (\S+)%", done.stdout)]
    assert len(found) == 2
    assert found[-1] > 85


def test_digits_takes_a_strategy_from_a_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("amp: {dtype: bfloat16}\n")
    done = fleetrun(ROOT / "examples" / "digits.py", "--epochs", 1, "--strategy", "mine.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "requested: amp\n" in done.stdout
