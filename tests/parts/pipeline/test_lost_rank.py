"""One rank is killed in a step: all others stop with an error that names it."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from multiprocessing import get_context

import pytest
import torch
from torch import nn

from fleetx import WorldError, fleet
from forking import forks

SECONDS = 150  # limit for what takes one second on an idle machine


def train(rank, port, pipe):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4"}
    os.environ.update(where | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    fleet.init(timeout=timedelta(seconds=SECONDS))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = fleet.DistributedStrategy(pipeline={"stages": ["2", "4", "6"], "micro_batch": 8})
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    try:
        for step in range(100_000):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            fleet.forward_backward(x, x, loss_fn=slow_loss)
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                pipe.send("running")
    except WorldError as error:
        pipe.send(str(error))


def slow_loss(output, target):
    time.sleep(0.02)
    return nn.functional.mse_loss(output, target)


def received(pipe):
    assert pipe.poll(SECONDS), f"nothing in {SECONDS} s"
    return pipe.recv()


@pytest.mark.parametrize("killed", [0, 1, 3])
def test_the_others_name_the_lost_rank(killed):
    context = get_context(forks())
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(4)]
    processes = [
        context.Process(target=train, args=(rank, port, ours), daemon=True) for rank, (_, ours) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        assert [received(pipe) for pipe, _ in pipes] == ["running"] * 4
        time.sleep(0.3)
        processes[killed].kill()
        for rank, (pipe, _) in enumerate(pipes):
            if rank != killed:
                assert f"rank {rank} cannot continue: rank {killed} on " in received(pipe)
    finally:
        for process in processes:
            process.kill()
            process.join()
