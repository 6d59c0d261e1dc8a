"""SIGTERM as schedulers send it: to every process of a job, workers of loaders and the helpers of fleetrun included."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

SCRIPT = """
import pathlib, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from fleetx import fleet

fleet.init()
model = nn.Linear(2, 1)
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = DataLoader(TensorDataset(torch.ones(1_000_000, 2)), batch_size=4, num_workers=2)
with fleet.checkpoints("run", every=10**6, asynchronous=%(asynchronous)s) as checkpoints:
    for number, (x,) in enumerate(loader):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.stepped()
        if number == 3:
            pathlib.Path(f"up.{fleet.worker_index()}").write_text("up\\n")
        time.sleep(0.01)
"""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_job_whose_processes_all_get_sigterm_saves_and_ends_with_143(fleetrun, tmp_path, asynchronous):
    run = fleetrun(SCRIPT % {"asynchronous": asynchronous}, options="--nproc_per_node 2 --max_restarts 2")
    run.wait_for("up.0"), run.wait_for("up.1")
    for pid in run.survivors():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    run.finish()
    assert run.code == 143, run.err
    assert run.err.splitlines()[1:] == ["fleetrun: stopped by SIGTERM"]
    (saved,) = os.listdir(tmp_path / "run")
    assert run.log(0) == f"SIGTERM: training ends after step {int(saved[5:])}; the newest checkpoint is {saved}\n"
    assert run.log(1) == ""
    assert run.survivors() == []
