"""The environment of a worker."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest
from launching import SECONDS, start

from fleetx.launch.environment import endpoints_of, worker_environment
from fleetx.launch.job import Attempt
from fleetx.launch.options import parse

DUMP = """
import json, os
with open(f"env.{os.environ['RANK']}", "w") as file:
    json.dump(dict(os.environ), file)
print("echoed")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two workers on the CPU, in a terminal."""
    terminal, stdout = pty.openpty()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            patch.delenv(name, raising=False)
        options = "--device cpu --gpus 0,1 --max_restarts 1 --cold"
        run = start(tmp_path_factory.mktemp("env"), DUMP, options=options, stdout=stdout)
    os.close(stdout)
    assert run.finish().code == 0, run.err
    run.out = os.read(terminal, 1000).decode()
    os.close(terminal)
    return run


@pytest.fixture(scope="module")
def workers(run):
    """The environments of both workers."""
    return [json.loads((run.where / f"env.{rank}").read_text()) for rank in range(2)]


def test_torchs_variables(workers):
    for rank, env in enumerate(workers):
        assert env["RANK"] == env["LOCAL_RANK"] == str(rank)
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2"
        assert env["GROUP_RANK"] == "0"
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert env["TORCHELASTIC_MAX_RESTARTS"] == "1"
    assert workers[0]["MASTER_PORT"] == workers[1]["MASTER_PORT"]


def test_paddles_variables(workers):
    endpoints = workers[0]["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert len(set(endpoints)) == 2
    assert all(endpoint.startswith("127.0.0.1:") for endpoint in endpoints)
    for rank, env in enumerate(workers):
        assert env["PADDLE_TRAINER_ID"] == env["PADDLE_RANK_IN_NODE"] == str(rank)
        assert env["PADDLE_TRAINERS_NUM"] == "2"
        assert env["PADDLE_TRAINER_ENDPOINTS"].split(",") == endpoints
        assert env["PADDLE_CURRENT_ENDPOINT"] == endpoints[rank]
        assert "FLAGS_selected_gpus" not in env


def test_our_variables(workers):
    cores = len(os.sched_getaffinity(0))
    for env in workers:
        assert env["FLEETX_DEVICE"] == "cpu"
        assert 1 <= int(env["OMP_NUM_THREADS"]) <= max(1, cores // 2)
        assert env["GLOO_SOCKET_IFNAME"] == "lo"


def test_in_a_terminal_worker_0_is_told_so(run, workers):
    assert run.out.strip() == "echoed"
    assert (workers[0]["COLUMNS"], workers[0]["FORCE_COLOR"]) == ("80", "1")
    assert not {"COLUMNS", "FORCE_COLOR"} & set(workers[1])


def test_everything_that_torchrun_sets_is_set(workers, tmp_path):
    (tmp_path / "dump.py").write_text(DUMP)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", "dump.py"]
    subprocess.run(torchrun, cwd=tmp_path, check=True, capture_output=True, timeout=SECONDS)
    theirs = json.loads((tmp_path / "env.0").read_text())
    meant_for_the_agent = {"TORCHELASTIC_SIGNALS_TO_HANDLE", "COLUMNS", "LINES"}
    assert set(theirs) - set(os.environ) - meant_for_the_agent <= set(workers[0])


def test_the_users_variables_are_kept_and_gpus_are_assigned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    job = parse(["--device", "cpu", "train.py"], environ={"OMP_NUM_THREADS": "3"})
    assert job.threads is None
    where = {"master_addr": "a", "master_port": 1, "endpoints": ("a:1", "a:2"), "nodes": 1, "node": 0}
    attempt = Attempt(number=0, run_id="x", slots=(0, 1), restarts=0, **where)
    environ = {"OMP_NUM_THREADS": "3", "FLAGS_selected_gpus": "7", "GLOO_SOCKET_IFNAME": "eth0"}
    env = worker_environment(job, attempt=attempt, local_rank=0, error_file=tmp_path, environ=environ)
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert not {"FLAGS_selected_gpus", "FORCE_COLOR"} & set(env)  # no GPU, no terminal
    on_gpus = type(job)(**{**vars(job), "device": "cuda", "gpus": ("2", "3"), "workers": 2})
    env = worker_environment(on_gpus, attempt=attempt, local_rank=1, error_file=tmp_path, environ=environ)
    assert (env["CUDA_VISIBLE_DEVICES"], env["FLAGS_selected_gpus"], env["LOCAL_RANK"]) == ("2,3", "1", "1")


def test_endpoints_on_several_nodes_start_at_paddles_port(monkeypatch):
    monkeypatch.delenv("FLAGS_START_PORT", raising=False)
    assert endpoints_of(["a", "b"], workers=2) == ("a:6070", "a:6071", "b:6070", "b:6071")
    assert endpoints_of(["a", "a"], workers=2) == ("a:6070", "a:6071", "a:6072", "a:6073")
    monkeypatch.setenv("FLAGS_START_PORT", "7000")
    assert endpoints_of(["a", "b"], workers=1) == ("a:7000", "b:7000")
