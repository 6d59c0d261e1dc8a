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


def written(path):
    return path.exists() and path.read_text().endswith("\n")


def test_workers_that_are_killed_at_random_moments_are_restarted_also_without_the_fork_server(fleetrun, tmp_path):
    """First the fork server is killed or stopped together with a worker."""
    dice = random.Random(0)
    run = fleetrun(SCRIPT, options="--nproc_per_node 2 --max_restarts 1000 --restart_delay 0")
    kills = 0
    for what in (signal.SIGKILL, signal.SIGSTOP, None, None, None):
        path = tmp_path / f"pid.{kills}.{dice.randrange(2)}"
        until(lambda path=path: written(path) or run.process.poll() is not None, what=path.name)
        for pid in run.survivors() if what else ():
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"fork_server.py" in file.read():
                    os.kill(pid, what)
        time.sleep(dice.random() * 0.3)
        try:
            os.kill(int(path.read_text()), signal.SIGKILL)
        except OSError:
            break  # it has finished
        kills += 1
    run.finish()
    assert run.code == 0, run.err
    assert (tmp_path / "step").read_text() == "20"
    assert run.survivors() == []
    assert run.err.count("; restart") == kills > 1


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
