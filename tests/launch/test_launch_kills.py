"""`kill -9` of workers and of fleetrun at random moments: the job goes on or ends, and nothing is left running."""

from __future__ import annotations

import os
import random
import signal
import time

from launching import free_port, until

# Takes 20 steps in all, however often it is killed: the number of the last one is in the file `step`.
SCRIPT = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
pathlib.Path(f"pid.{attempt}.{rank}").write_text(f"{os.getpid()}\\n")
dist.init_process_group("gloo")
step = torch.tensor(int(pathlib.Path("step").read_text()) if os.path.exists("step") else 0)
dist.broadcast(step, 0)
while step < 20:
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == dist.get_world_size()
    step += 1
    if rank == "0":
        pathlib.Path("step.part").write_text(str(int(step)))
        os.replace("step.part", "step")
    time.sleep(0.02)
dist.destroy_process_group()
"""


def test_workers_that_are_killed_at_random_moments_are_restarted(fleetrun, tmp_path):
    dice = random.Random(0)
    run = fleetrun(SCRIPT, options="--nproc_per_node 2 --max_restarts 1000 --restart_delay 0")
    kills = attempt = 0
    while kills < 6 and run.process.poll() is None:
        rank = dice.randrange(2)
        path = tmp_path / f"pid.{attempt}.{rank}"
        until(lambda path=path: path.exists() or run.process.poll() is not None, what=path.name)
        if run.process.poll() is not None:
            break
        time.sleep(dice.random() * 0.3)
        victim = int(path.read_text() or 0)
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            break  # it has finished
        kills, attempt = kills + 1, attempt + 1
    run.finish()
    assert run.code == 0, run.err
    assert (tmp_path / "step").read_text() == "20"
    assert run.survivors() == []
    assert run.err.count("; restart") == kills


def test_a_fork_server_that_is_killed_or_stopped_is_no_obstacle(fleetrun, tmp_path):
    run = fleetrun(SCRIPT, options="--nproc_per_node 2 --max_restarts 1000 --restart_delay 0")
    for attempt, number in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        victim = int(run.wait_for(f"pid.{attempt}.1"))
        for pid in run.survivors():
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"fork_server.py" in file.read():
                    os.kill(pid, number)
        os.kill(victim, signal.SIGKILL)
    run.finish()
    assert run.code == 0, run.err
    assert (tmp_path / "step").read_text() == "20"
    assert run.survivors() == []


def test_kill_9_of_any_fleetrun_ends_a_job_of_two_nodes_everywhere(fleetrun, tmp_path):
    for victim in (0, 1):
        where = f"--nnodes 2 --master 127.0.0.1:{free_port()} --max_restarts 3 --cold"
        script = SCRIPT.replace("step < 20", "True")
        runs = [
            fleetrun(script, where=tmp_path / f"{victim}.{rank}", options=f"{where} --rank {rank}") for rank in (0, 1)
        ]
        for rank, run in enumerate(runs):
            run.wait_for(f"pid.0.{rank}")
        runs[victim].signal(signal.SIGKILL)
        other = runs[1 - victim].finish()
        assert other.code == 1
        assert f"lost node {victim}" in other.err
        runs[victim].finish()
        for run in runs:
            until(lambda run=run: run.survivors() == [], what="everything to be gone")
