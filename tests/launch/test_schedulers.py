"""Real launchers and schedulers start two workers, which train as one process does."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import PACKAGES, SECONDS, free_port, until
from torch import nn

import forked_python
from fleetx.errors import LaunchError
from fleetx.launch.options import parse

SCRIPT = """
import json, sys
import torch
from torch import nn
from fleetx import fleet

fleet.init()
torch.manual_seed(0)
model = nn.Linear(3, 2, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy())
x = torch.arange(12, dtype=torch.float64).view(4, 3) / 12
for _ in range(3):
    model(x[fleet.worker_index() :: fleet.worker_num()]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
place = [fleet.worker_index(), fleet.worker_num(), fleet.local_rank()]
with open(f"result.{fleet.worker_index()}", "w") as file:
    json.dump([place, model.weight.tolist()], file)
"""


def check(folder):
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(12, dtype=torch.float64).view(4, 3) / 12
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in range(2):
        place, weight = json.loads((folder / f"result.{rank}").read_text())
        assert place == [rank, 2, rank]
        torch.testing.assert_close(torch.tensor(weight, dtype=torch.float64), model.weight.detach())


def environment(**more):
    """Without what a launcher around the tests may have set."""
    keep = {
        k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI", "PET_", "RANK", "WORLD"))
    }
    return keep | {"PYTHONPATH": PACKAGES, "FLEETX_DEVICE": "cpu", "OMP_NUM_THREADS": "1"} | more


def run(command, folder, **more):
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    check(folder)


def installed(*programs):
    missing = [program for program in programs if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


@installed("mpirun.openmpi")
def test_open_mpi(tmp_path):
    mpirun = "mpirun.openmpi --allow-run-as-root --oversubscribe -np 2"
    run([*mpirun.split(), *forked_python.command(), "train.py"], tmp_path)


@installed("mpirun.mpich")
def test_mpich(tmp_path):
    run(["mpirun.mpich", "-np", "2", *forked_python.command(), "train.py"], tmp_path, MASTER_PORT=str(free_port()))


@pytest.fixture
def slurm(tmp_path):
    """A cluster of one node: the daemons of munge and Slurm, with files and ports of their own."""
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    settings = {
        "ClusterName": "test", "SlurmctldHost": "localhost", "SlurmUser": "root", "SlurmdUser": "root",
        "AuthType": "auth/munge", "AuthInfo": f"socket={folder}/munge.socket", "CredType": "cred/munge",
        "SlurmctldPort": free_port(), "SlurmdPort": free_port(), "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool", "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid", "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none",
        "MpiDefault": "none", "ReturnToService": 2, "SelectType": "select/cons_tres",
        "NodeName": "localhost NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN",
        "PartitionName": "all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    }  # fmt: skip
    (folder / "slurm.conf").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    path = f"{os.environ['PATH']}:/usr/sbin"
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    files = "".join(f" --{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file"))
    daemons = [f"munged --foreground --force --key-file={key}{files}", "slurmctld -D", "slurmd -D -N localhost"]
    started = []
    try:
        for command in daemons:
            with open(folder / f"{command.split()[0]}.out", "w") as out:
                started.append(subprocess.Popen(command.split(), env=env, stdout=out, stderr=out))
            if command.startswith("munged"):
                until((folder / "munge.socket").exists, what="munged")

        def idle():
            said = subprocess.run(["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, timeout=60)
            return said.stdout.strip() == "idle"

        until(idle, what="the node to be idle")
        yield {"SLURM_CONF": env["SLURM_CONF"], "PATH": path}
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


@installed("munged", "slurmctld", "slurmd", "srun")
@pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of Slurm need root")
def test_slurm(slurm, tmp_path):
    run(["srun", "--overcommit", "-n", "2", *forked_python.command(), "train.py"], tmp_path, **slurm)


@pytest.mark.nightly  # tests/comm/test_roles.py has the variables
@installed("munged", "slurmctld", "slurmd", "srun", "mpirun.openmpi")
@pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of Slurm need root")
def test_open_mpi_in_a_step_of_slurm(slurm, tmp_path):
    mpirun = "mpirun.openmpi --allow-run-as-root --oversubscribe -np 2"
    run(["srun", "-n", "1", *mpirun.split(), sys.executable, "train.py"], tmp_path, **slurm)


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[train]'")
def test_ray(tmp_path):
    job = Path(__file__).with_name("ray_job.py")
    run([sys.executable, str(job), str(tmp_path), str(tmp_path / "train.py")], tmp_path, RAY_USAGE_STATS_ENABLED="0")


@pytest.mark.parametrize("scheduler", ["kubeflow", "sagemaker"])
def test_two_nodes_of_a_scheduler(tmp_path, scheduler):
    """Both nodes are this machine; their variables are those that the scheduler sets."""
    port, folders, processes = free_port(), [], []
    for rank in range(2):
        env = {
            "kubeflow": {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank),
                         "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)},
            "sagemaker": {"SM_HOSTS": '["127.0.0.1", "localhost"]', "SM_NUM_GPUS": "0",
                          "SM_CURRENT_HOST": ["127.0.0.1", "localhost"][rank]},
        }[scheduler]  # fmt: skip
        if scheduler == "sagemaker" and not _free(29500):
            pytest.skip("port 29500 is in use")
        folders.append(tmp_path / str(rank))
        folders[-1].mkdir()
        (folders[-1] / "train.py").write_text(SCRIPT.replace("fleet.local_rank()]", "fleet.worker_index()]"))
        command = [*forked_python.command(), "-m", "fleetx.launch", "--device", "cpu", "train.py"]
        processes.append(
            subprocess.Popen(command, cwd=folders[-1], env=environment(**env), stderr=subprocess.PIPE, text=True)
        )
    for process in processes:
        _, said = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said
    (folders[1] / "result.1").rename(folders[0] / "result.1")
    check(folders[0])


def _free(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) != 0


def job_of(arguments="", **env):
    script = str(Path(__file__))
    return parse([*arguments.split(), "--device", "cpu", script], environ=env)


SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "0"}


def test_what_schedulers_say():
    job = job_of(**SKYPILOT)
    assert (job.nodes, job.rank, job.master, job.address) == (2, 1, ("10.0.0.1", 6069), "10.0.0.2")
    job = job_of(PET_NNODES="1", PET_NPROC_PER_NODE="3", PET_NODE_RANK="0", PET_MASTER_ADDR="x")
    assert (job.nodes, job.workers) == (1, 3)
    job = job_of(PET_NNODES="1", PET_NPROC_PER_NODE="auto")
    assert (job.nodes, job.workers) == (1, 1)
    two = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1"}
    job = job_of(**two, PET_MASTER_ADDR="10.0.0.1", PET_MASTER_PORT="1234")
    assert (job.nodes, job.workers, job.rank, job.master) == (2, 1, 1, ("10.0.0.1", 1234))
    assert job_of(**two, PET_MASTER_ADDR="10.0.0.1").master == ("10.0.0.1", 29500)
    assert job_of(**two, PET_RDZV_ENDPOINT="10.0.0.1:99").master == ("10.0.0.1", 99)
    job = job_of(SM_HOSTS='["algo-1"]', SM_CURRENT_HOST="algo-1")
    assert job.nodes == 1
    for rank, host in enumerate(["algo-1", "algo-2"]):
        job = job_of(SM_HOSTS='["algo-2", "algo-1"]', SM_CURRENT_HOST=host)
        assert (job.nodes, job.rank, job.master) == (2, rank, ("algo-1", 29500))


def test_the_command_line_wins():
    job = job_of("--nnodes 3 --rank 2 --master 10.1.1.1:99", **SKYPILOT)
    assert (job.nodes, job.rank, job.master) == (3, 2, ("10.1.1.1", 99))
    assert job_of("--nproc_per_node 2", PET_NPROC_PER_NODE="4").workers == 2
    assert job_of("--gpus 0,1", PET_NPROC_PER_NODE="4").workers == 2


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"PET_NNODES": "two"}, "PET_NNODES=two: must be a whole number"),
        ({"PET_NNODES": "2"}, "--nnodes 2 requires --master and --rank"),
        ({"SM_HOSTS": "algo-1"}, "SM_HOSTS=algo-1: must be a list of hosts as JSON"),
        ({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "c"}, "SM_CURRENT_HOST=c: must be one of SM_HOSTS, a, b"),
    ],
)
def test_variables_that_make_no_sense_are_named(env, message):
    with pytest.raises(LaunchError, match=message.replace("[", r"\[")):
        job_of(**env)
