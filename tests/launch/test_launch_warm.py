"""The workers of a restart are forks of a process that has imported torch, and cannot be told from the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launching import PACKAGES, SECONDS, until

# For each script: start a worker by `python runner.py` (cold), and one or two by the fork server (warm).
HARNESS = """
import json, os, subprocess, sys, time
from fleetx.launch.warm import ForkServer
from fleetx.launch.workers import RUNNER, adopt_orphans

adopt_orphans()
common = {**os.environ, "OMP_NUM_THREADS": "3"}
server = ForkServer(environ=common, modules=[])
def command(script, name):
    return [str(os.getpid()), os.path.abspath(f"{script}/{name}.log"), "script", f"{script}/train.py", "--lr", "0.1"]
def environ(script, name):
    record = os.path.abspath(f"{script}/{name}.json")
    return {**common, "RANK": "7", "NAME": name, "TORCHELASTIC_ERROR_FILE": record}
def cold(*where):
    words = [sys.executable, "-u", str(RUNNER), *command(*where)]
    return subprocess.Popen(words, env=environ(*where), start_new_session=True)
codes = {script: [cold(script, "cold").wait()] for script in sys.argv[1:]}
while not server.ready():
    assert server.alive() and not server.refusal, server.refusal
    time.sleep(0.05)
for script in sys.argv[1:]:
    for name in ("warm", "again") if script == "like" else ("warm",):
        where = script, name
        codes[script].append(server.fork(command(*where), environ=environ(*where)).wait())
server.end()
assert server.fork(command("like", "late"), environ=environ("like", "late")) is None
print(json.dumps(codes))
"""

SCRIPTS = {
    "like": """
        import inspect, json, os, pickle, random, sys, threading
        import helper
        warm = sys.orig_argv[2].endswith("fork_server.py")
        before = {name: name in sys.modules for name in ("torch", "numpy", "fleetx")}
        import importlib.util
        found = importlib.util.find_spec("torch").origin, "torch" in sys.modules
        import numpy, torch, fleetx
        class Thing: pass
        environ = {k: v for k, v in os.environ.items() if k not in ("NAME", "TORCHELASTIC_ERROR_FILE")}
        files = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n not in "012"]
        print(json.dumps({
            "same": [
                before, found, environ, os.getcwd(), sys.argv, sys.path, sys.flags, __file__, __name__, str(__spec__),
                helper.NAME, os.getppid(), os.getsid(0) == os.getpid() == os.getpgid(0), torch.get_num_threads(),
                threading.active_count(), sys.meta_path == sys.meta_path[-4:],
                [name for name in files if "socket" in name or "pipe" in name], torch.__spec__.name,
                torch.__spec__.origin, type(torch.__spec__.loader).__name__, os.path.realpath("/proc/self/fd/0"),
                type(pickle.loads(pickle.dumps(Thing()))) is Thing is sys.modules["__main__"].Thing,
                inspect.getsource(Thing), torch.ones(200, 200).sum().item(), sys.stdout.encoding, os.umask(0o022),
            ],
            "warm": warm,
            "seeds": [random.random(), numpy.random.rand(), torch.initial_seed(), torch.rand(()).item()],
        }))
        raise ValueError("the end")
        """,
    "variables": """
        import os, sys
        print("first line", sys.orig_argv[2].endswith("fork_server.py"))
        os.environ["UNRELATED"] = "1"
        os.environ["OMP_NUM_THREADS"] = "2"
        import torch
        print(torch.get_num_threads())
        """,
    "shadow": "import sympy, sys; print(sympy.NAME, 'torch' in sys.modules); sys.exit(5)",
}


@pytest.fixture(scope="module")
def folder(once):
    return Path(once("warm", compared))


def compared(folder):
    """Run each script cold and warm, and return the folder with what they wrote."""
    for name, script in SCRIPTS.items():
        (folder / name).mkdir()
        (folder / name / "train.py").write_text(textwrap.dedent(script))
    (folder / "like" / "helper.py").write_text("NAME = 'next to the script'")
    (folder / "shadow" / "sympy.py").write_text("NAME = 'mine'")
    (folder / "harness.py").write_text(HARNESS)
    harness = subprocess.run(
        [sys.executable, "harness.py", *SCRIPTS],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PACKAGES},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
    )
    assert harness.returncode == 0, harness.stderr
    (folder / "codes").write_text(harness.stdout)
    return str(folder)


@pytest.fixture
def outcome(folder):
    """outcome(script): the exit codes and the logs of a cold worker and of the warm ones."""

    def of(script):
        codes = json.loads((folder / "codes").read_text())[script]
        names = ("cold", "warm", "again")[: len(codes)]
        return codes, [(folder / script / f"{name}.log").read_text() for name in names]

    return of


def test_a_warm_worker_is_like_a_cold_one(outcome, folder):
    codes, logs = outcome("like")
    assert codes == [1, 1, 1]
    reports = [json.loads(log.splitlines()[0]) for log in logs]
    assert [report["warm"] for report in reports] == [False, True, True]
    assert reports[0]["same"] == reports[1]["same"] == reports[2]["same"]
    for values in zip(*(report["seeds"] for report in reports), strict=True):
        assert len(set(values)) == 3
    assert len({log.split("\n", 1)[1] for log in logs}) == 1  # the tracebacks
    for name in ("cold", "warm", "again"):
        record = json.loads((folder / "like" / f"{name}.json.last").read_text())
        assert record["message"]["message"] == "ValueError: the end"


def test_what_a_script_sets_before_it_imports_torch_has_its_effect(outcome):
    codes, logs = outcome("variables")
    assert codes == [0, 0]
    assert logs[0] == "first line False\n2\n"
    assert logs[1] == "first line True\nfirst line False\n2\n"  # it has started over


def test_a_module_next_to_the_script_comes_before_an_installed_one_and_a_warm_worker_has_the_exit_code(outcome):
    codes, said = outcome("shadow")
    # In torch for CUDA, triton reports at the end what the hidden modules still hold.
    assert (codes, [text.partition("nanobind: ")[0] for text in said]) == ([5, 5], ["mine False\n"] * 2)


def test_a_server_that_is_gone_forks_nothing(folder):
    assert not (folder / "like" / "late.log").exists()


def test_kill_9_of_fleetrun_also_ends_what_a_warm_worker_has_forked(fleetrun):
    run = fleetrun(
        """
        import os, sys, time
        if not sys.orig_argv[2].endswith("fork_server.py"):
            time.sleep(0.5)
            os._exit(3)
        if os.fork() == 0:
            os.setsid()
            print("up", file=open("up", "w"))
        time.sleep(1000)
        """,
        options="--max_restarts 1000 --restart_delay 0",
        cold=True,
    )
    run.wait_for("up")
    run.signal(signal.SIGKILL)
    run.finish()
    until(lambda: run.survivors() == [], what="everything to be gone")


def test_restarts_become_warm_as_soon_as_the_fork_server_is_ready(fleetrun):
    run = fleetrun(
        """
        import os, sys, time
        if not sys.orig_argv[2].endswith("fork_server.py"):
            print("cold", flush=True)
            time.sleep(3)  # a cold start costs more than waiting, and the server becomes ready meanwhile
            os._exit(3)
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print("warm", int(total), flush=True)
        dist.destroy_process_group()
        """,
        options="--nproc_per_node 2 --max_restarts 1000 --restart_delay 0",
        cold=True,
    ).finish()
    assert run.code == 0, run.err
    for rank in (0, 1):
        lines = [line for line in run.log(rank).splitlines() if line.startswith(("warm", "cold"))]
        assert set(lines[:-1]) == {"cold"}
        assert lines[-1] == "warm 2"
    assert run.survivors() == []
