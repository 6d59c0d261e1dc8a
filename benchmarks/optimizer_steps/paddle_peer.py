"""Paddle's optimizers, in the interpreter named by FLEETX_PADDLE_PYTHON. Each request is one step."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.frame import CannotRunError
from benchmarks.optimizer_steps.models import Shape
from benchmarks.optimizer_steps.stream import built

VARIABLE = "FLEETX_PADDLE_PYTHON"


class Paddle:
    """Sleeps while it waits for a request, so that only one side runs at a time."""

    def __init__(self, optimizer: str, shapes: list[Shape]):
        python = os.environ.get(VARIABLE)
        if not python:
            raise CannotRunError(
                f"{VARIABLE} must name an interpreter that has Paddle: python3 -m venv /tmp/paddle && "
                f"/tmp/paddle/bin/pip install paddlepaddle==3.3.1 && export {VARIABLE}=/tmp/paddle/bin/python"
            )
        script = str(Path(__file__).with_name("paddle_side.py"))
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # this interpreter's packages
        # The process ends with its input; the frame ends whatever is left in this session.
        with tempfile.TemporaryDirectory(prefix="stream-") as folder:
            command = [python, script, optimizer, json.dumps(shapes), str(built(Path(folder)))]
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.version = self._read_line()

    def timed(self, work: str) -> Callable[[], float]:
        def side() -> float:
            assert self.process.stdin is not None
            print(work, file=self.process.stdin, flush=True)
            return float(self._read_line())

        return side

    def _read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"Paddle's process exited with {self.process.wait()}")
        return line
