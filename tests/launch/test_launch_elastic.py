"""--elastic: workers and nodes that are lost, and come back."""

from __future__ import annotations

import os
import signal

import pytest
from launching import free_port, until

from fleetx.launch.options import parse
from fleetx.launch.rendezvous import SingleNodeRendezvous
from fleetx.launch.report import Failure
from fleetx.launch.sockets import single_node_attempt

SECRET = {"FLEETX_JOB_SECRET": "0123456789abcdef"}

# Every attempt appends a line to the file `sizes`, and works until it is told to stop or `finish` appears.
SCRIPT = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert "FLEETX_JOB_SECRET" not in os.environ
pathlib.Path(f"pid.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{rank}").write_text(f"{os.getpid()}\\n")
while True:
    state = torch.tensor([1.0, float(bool(stopping)), float(os.path.exists("%(finish)s"))])
    dist.all_reduce(state)
    if state[0] != size:
        sys.exit(9)
    if state[1]:  # as fleet.checkpoints does
        if rank == 0:
            with open("saved", "a") as file:
                print(size, file=file)
        dist.destroy_process_group()
        sys.exit(143)
    if state[2] == size:
        break
    time.sleep(0.05)
dist.destroy_process_group()
print("finished with", size)
"""

# The same in a training with fleetx, whose errors name the rank that was lost: %(fault)s is what happens in the fourth
# step. It goes on until `finish` appears on every rank.
TRAINING = """
import os, pathlib, signal, time
import torch, torch.distributed as dist
from torch import nn
from fleetx import fleet
fleet.init()
attempt, rank, size = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), fleet.worker_index(), fleet.worker_num()
model = nn.Linear(2, 1)
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy())
checkpoints = fleet.checkpoints("%(finish)s.run", every=2)
assert attempt == 0 or checkpoints.resumed
step, done = 0, False
while not done:
    if step == 3:
        pathlib.Path(f"pid.{attempt}.{rank}").write_text(f"{os.getpid()}\\n")
        %(fault)s
    done = step > 3 and os.path.exists("%(finish)s")
    agreed = torch.tensor(float(done))
    dist.all_reduce(agreed)
    done = agreed == size
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoints.stepped()
    step += 1
    time.sleep(0.01)
checkpoints.close()
print("finished with", size)
"""


def test_workers_that_fail_are_left_out_and_come_back(fleetrun, tmp_path):
    run = fleetrun(SCRIPT % {"finish": tmp_path / "finish"}, options="--elastic 1:2 --max_restarts 1 --regrow_after 0")
    victim = int(run.wait_for("pid.0.1"))
    run.wait_for("pid.0.0")
    os.kill(victim, signal.SIGKILL)
    run.wait_for("pid.2.1")  # attempt 1 had one worker, attempt 2 has both again
    (tmp_path / "finish").touch()
    run.finish()
    assert run.code == 0, run.err
    assert run.out.endswith("finished with 2\n")
    assert not (tmp_path / "pid.1.1").exists()
    assert run.err.splitlines()[1:] == [
        "fleetrun: rank 1: killed by SIGKILL; restart 1 of 1",
        "fleetrun: continuing with 1 of 2 workers",
        "fleetrun: back to 2 workers",
    ]
    assert run.survivors() == []


def test_only_the_worker_that_failed_is_left_out_if_the_errors_of_the_others_name_it(fleetrun, tmp_path):
    (tmp_path / "finish").touch()
    fault = """if size == 3 and rank == 2: raise ValueError("bad sample")
        if size == 2 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        if size > 1: fleet.save("state")  # its error names the lost rank without any of torch's words"""
    script = TRAINING % {"fault": fault, "finish": tmp_path / "finish"}
    run = fleetrun(script, options="--elastic 1:3 --max_restarts 2 --restart_delay 0").finish()
    assert run.code == 0, run.err
    assert run.out.endswith("finished with 1\n")
    assert run.err.splitlines()[1:] == [
        "fleetrun: rank 2: ValueError: bad sample (exit code 1); restart 1 of 2",
        "fleetrun: continuing with 2 of 3 workers",
        "fleetrun: rank 1: killed by SIGKILL; restart 2 of 2",
        "fleetrun: continuing with 1 of 3 workers",
    ]


@pytest.fixture
def slots(tmp_path, monkeypatch):
    """slots(elastic): next(failed slots, secondary ones) -> the slots of the next attempt; and the clock."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    class Node:
        now = 0.0

        def __init__(self, elastic):
            job = parse(["--device", "cpu", "--elastic", elastic, "--max_restarts", "9", "train.py"], environ={})
            attempt, listener = single_node_attempt(tuple(range(job.workers)))
            self.rendezvous = SingleNodeRendezvous(
                job, attempt=attempt, listener=listener, print_status=print, clock=lambda: self.now
            )
            self.store = self.rendezvous.next_rendezvous()

        def next(self, failed=None, *, secondary=()):
            present = self.rendezvous.attempt.slots
            if failed is not None:
                values = {"node": 0, "attempt": 0, "exit_code": 1, "time": 0.0, "error": "", "traceback": ""}
                self.rendezvous.add_failures(
                    [
                        Failure(rank=present.index(slot), tail=[], log="", secondary=slot in secondary, **values)
                        for slot in (*failed, *secondary)
                    ]
                )
            self.store = self.rendezvous.next_rendezvous()
            return self.rendezvous.attempt.slots

    return Node


def test_which_workers_continue(slots):
    node = slots("2:4")
    assert node.next([1], secondary=[0, 2, 3]) == (0, 2, 3)  # a rank that only lost its peers goes on
    assert node.next([2]) == (0, 3)
    assert node.rendezvous.num_nodes_waiting() == 0
    node.now += 60
    assert node.rendezvous.num_nodes_waiting() == 1
    assert node.rendezvous.resizing  # they have time to save their state
    restarts = node.rendezvous.attempt.restarts
    assert node.next() == (0, 1, 2, 3)
    assert node.rendezvous.attempt.restarts == restarts == 2  # to come back is not a failure
    assert node.rendezvous.num_nodes_waiting() == 0
    assert node.next([0, 1, 2]) == (0, 1, 2, 3)  # fewer than two would remain
    assert node.next([0, 1, 2, 3]) == (0, 1, 2, 3)  # the script fails everywhere
    assert node.next([], secondary=[0, 1]) == (0, 1, 2, 3)


def two_nodes(fleetrun, tmp_path, fault):
    """start(rank): a node of TRAINING, in which this happens in the fourth step."""
    where = f"--elastic 1:2 --master 127.0.0.1:{free_port()} --nproc_per_node 1"
    script = TRAINING % {"fault": fault, "finish": tmp_path / "finish"}

    def start(rank):
        return fleetrun(script, where=tmp_path / f"node{rank}", options=f"{where} --rank {rank}", **SECRET)

    return start


def test_a_node_that_is_killed_while_another_waits_for_it_in_a_save_is_left_out_and_comes_back(fleetrun, tmp_path):
    fault = """if attempt == 0 and rank == 1: time.sleep(1000)
        if attempt == 0: fleet.save("state")"""
    start = two_nodes(fleetrun, tmp_path, fault)
    first, second = start(0), start(1)
    first.wait_for("pid.0.0")
    second.wait_for("pid.0.1")
    second.signal(signal.SIGKILL)
    first.wait_for("pid.1.0")  # alone
    until(lambda: second.survivors() == [], what="the workers of the killed node to be gone")
    second.process.communicate()
    third = start(1)
    third.wait_for("pid.2.1")
    (tmp_path / "finish").touch()
    for run in (first, third):
        run.finish()
        assert run.code == 0, run.err
        assert run.survivors() == []
    assert first.out.endswith("finished with 2\n")
    assert first.err.splitlines()[1:] == [
        "fleetrun: 2 of 2 nodes take part: 0, 1",
        "fleetrun: a node was lost",
        "fleetrun: 1 of 2 nodes take part: 0",
        "fleetrun: a node joins or leaves",
        "fleetrun: 2 of 2 nodes take part: 0, 1",
    ]


def test_a_node_that_freezes_while_another_waits_for_it_in_a_save_is_left_out(fleetrun, tmp_path):
    fault = f"""if size == 2 and rank == 1:
            from fleetx.engine.checkpoint import tensor_file
            tensor_file.write = lambda *_: time.sleep(1000)
        if size == 2: fleet.save("{tmp_path}/state")  # the other one waits in a collective"""
    start = two_nodes(fleetrun, tmp_path, fault)
    first, second = start(0), start(1)
    first.wait_for("pid.0.0")
    second.wait_for("pid.0.1")
    for pid in second.survivors():
        os.kill(pid, signal.SIGSTOP)
    first.wait_for("pid.1.0")
    (tmp_path / "finish").touch()
    assert first.finish().code == 0, first.err
    assert first.out.endswith("finished with 1\n")
    assert "failed" not in first.err


@pytest.mark.parametrize("elastic", [False, True])
def test_sigterm_on_one_node_lets_all_save_together(fleetrun, tmp_path, elastic):
    """The job ends with 143 everywhere; with --elastic, the other node goes on."""
    port = free_port()
    runs = []
    for rank in (0, 1):
        options = f"{'--elastic 1:2' if elastic else '--nnodes 2'} --master 127.0.0.1:{port} --rank {rank}"
        script = SCRIPT % {"finish": tmp_path / "finish"}
        runs.append(fleetrun(script, where=tmp_path / f"node{rank}", options=options, **SECRET))
    for rank, run in enumerate(runs):
        run.wait_for(f"pid.0.{rank}")
        run.wait_for_the_agent() if rank == 0 else None
    runs[1].signal(signal.SIGTERM)
    assert runs[1].finish().code == 143
    assert "stopped by SIGTERM" in runs[1].err
    if elastic:
        runs[0].wait_for("pid.1.0")
        (tmp_path / "finish").touch()
        assert runs[0].finish().code == 0, runs[0].err
    else:
        assert runs[0].finish().code == 143, runs[0].err
        assert "fleetrun: stopped because another node was: node 1: stopped by SIGTERM\n" in runs[0].err
    assert (tmp_path / "node0" / "saved").read_text() == "2\n"  # both ranks were there
    for run in runs:
        assert run.survivors() == []
        assert "0123456789abcdef" not in run.err + run.out
