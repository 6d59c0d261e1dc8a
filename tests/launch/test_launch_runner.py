"""How a worker runs its script. The runner is started directly here: it needs no fleetrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from launching import SECONDS

from fleetx.launch.workers import RUNNER


@pytest.fixture
def runner(tmp_path):
    """runner(kind, target, *arguments) -> (exit code, log)"""

    def run(kind, target, *arguments):
        command = [sys.executable, "-u", str(RUNNER), str(os.getpid()), "log", kind, target, *arguments]
        environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
        code = subprocess.run(command, cwd=tmp_path, env=environ, timeout=SECONDS).returncode
        return code, (tmp_path / "log").read_text()

    return run


SCRIPT = """
import inspect, multiprocessing, os, pickle, sys, helper
class Thing: pass
def child(queue): queue.put(("child", __name__))
if __name__ == "__main__":
    queue = multiprocessing.get_context("spawn").Queue()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(queue,))
    process.start(); print(*queue.get(timeout=100)); process.join()
    print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, sys.argv, __file__, __spec__, helper.NAME)
    print(sys.modules["__main__"].Thing is Thing, "fleetx" in sys.modules, "torch" in sys.modules)
    print("source", inspect.getsource(Thing).strip())
"""


def test_a_script_runs_as_with_python(runner, tmp_path):
    (tmp_path / "helper.py").write_text("NAME = 'next to the script'")
    (tmp_path / "train.py").write_text(SCRIPT)
    code, log = runner("script", "train.py", "--gpus", "3", "--", "--log_dir", "x")
    assert code == 0, log
    assert log.splitlines() == [
        "child __mp_main__",
        f"True ['train.py', '--gpus', '3', '--', '--log_dir', 'x'] {tmp_path / 'train.py'} None next to the script",
        "True False False",
        "source class Thing: pass",
    ]


def test_a_module_runs_as_with_python_m(runner, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "name.py").write_text("NAME = 'relative'")
    file = tmp_path / "package" / "__main__.py"
    file.write_text("import sys; from .name import NAME; print(NAME, __name__, __package__, __spec__.name, sys.argv)")
    code, log = runner("module", "package", "--lr", "0.1", "-m", "x")
    assert code == 0, log
    assert log == f"relative __main__ package package.__main__ {[str(file), '--lr', '0.1', '-m', 'x']}\n"


def test_a_syntax_error_is_logged_and_recorded_as_python_shows_it(runner, tmp_path):
    (tmp_path / "train.py").write_text("x = (\n")
    code, log = runner("script", "train.py")
    assert code == 1
    message = json.loads((tmp_path / "error.json.last").read_text())["message"]
    assert message["message"].startswith("SyntaxError: '(' was never closed")
    assert message["extraInfo"]["py_callstack"] == log
    assert log.lstrip().startswith('File "')
    assert "runner.py" not in log


def test_an_exception_in_a_forked_child_is_not_recorded_as_the_workers(runner, tmp_path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import os
            if os.fork() == 0:
                raise ValueError("in the child")
            os.wait()
            """
        )
    )
    code, log = runner("script", "train.py")
    assert code == 0
    assert "ValueError: in the child" in log
    assert not (tmp_path / "error.json.last").exists()
