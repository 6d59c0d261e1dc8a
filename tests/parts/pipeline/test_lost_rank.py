"""One rank is killed in a step: all others stop with an error that names it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

SCRIPT = """
import os, sys, time, torch
from datetime import timedelta
from torch import nn
from fleetx import WorldError, fleet

torch.set_num_threads(1)
fleet.init(timeout=timedelta(seconds=60))
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
strategy = fleet.DistributedStrategy(pipeline={"stages": ["2", "4", "6"], "micro_batch": 8})
model, optimizer = fleet.distribute(model, optimizer, strategy)

for step in range(1000):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    fleet.forward_backward(x, x, loss_fn=lambda out, y: (time.sleep(0.02), nn.functional.mse_loss(out, y))[1])
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        print("running", flush=True)
"""


@pytest.mark.parametrize("killed", [0, 1, pytest.param(3, marks=pytest.mark.nightly)])
def test_the_others_name_the_lost_rank(tmp_path, killed):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4", "FLEETX_DEVICE": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)], env=os.environ | where | {"RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for r in range(4)
    ]  # fmt: skip
    try:
        assert all("running" in p.stdout.readline() for p in processes)
        time.sleep(0.3)
        os.kill(processes[killed].pid, signal.SIGKILL)
        for rank, process in enumerate(processes):
            if rank != killed:
                _, errors = process.communicate(timeout=60)
                assert process.returncode != 0
                assert f"WorldError: rank {rank} cannot continue: rank {killed} on " in errors, errors[-2000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
