"""What checkpoints cost: a save of 400 MB against plain torch.distributed.checkpoint, and saving in the background.

Both sides write a new folder, fsync its files and remove the folder before. Only ours hashes them, checks the
parameters, and syncs the folder too. `over_the_last` lets torch write over its last files instead, which is faster, but
a kill then leaves neither the old checkpoint nor the new one, or a mixture that loads.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.frame import Run, Sides, benchmark
from benchmarks.frame.interleave import Side, clocked, interleave
from fleetx import fleet
from fleetx.engine.checkpoint.hashing_file import HashingFile

PAGE = "checkpoints.md"
MEGABYTES = 400
SAVE_GOAL, STALL_SECONDS = 1.2, 0.2
ADDED_SECONDS = 0.03 * 60  # by a save in the background: 3 %, if there is one every minute
EVERY = 10  # steps between two saves in the background
ROWS = 256  # of a batch: as much work as two sequences of 128 tokens


def _armed(parameters: int, *, momentum: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    fleet.init()
    torch.manual_seed(0)
    width = 1024
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(max(1, parameters // width**2))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if momentum else 0.0)
    return fleet.distribute(model, optimizer)


def _save(run: Run, *, over_the_last: bool = False) -> Sides:
    model, _ = _armed(MEGABYTES * 10**6 // 4, momentum=False)
    folder = Path(tempfile.gettempdir()) / f"fleetx-benchmark-{fleet.worker_num()}"

    cpu: dict[str, list[float]] = {"ours": [], "theirs": []}  # seconds of this process, which other work hardly changes

    def ours() -> None:
        began = time.process_time()
        fleet.save(folder / "ours")
        cpu["ours"].append(time.process_time() - began)

    count = itertools.count()

    def theirs() -> None:
        began, number = time.process_time(), 0 if over_the_last else next(count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(model.state_dict(), checkpoint_id=folder / f"theirs-{number}", no_dist=fleet.worker_num() == 1)
        if run.rank == 0:
            shutil.rmtree(folder / f"theirs-{number - 1}", ignore_errors=True)
        cpu["theirs"].append(time.process_time() - began)

    try:
        return run.compare(ours, theirs, cpu=cpu)
    finally:
        if run.rank == 0:
            seconds = {side: f"{sorted(found)[len(found) // 2]:.2f}" for side, found in cpu.items()}
            print(f"CPU seconds of a save: {seconds['ours']}, of torch's {seconds['theirs']}", flush=True)
        fleet.barrier_worker()
        shutil.rmtree(folder, ignore_errors=True)


@benchmark(ours="fleet.save", theirs="dcp.save", goal=SAVE_GOAL, ranks=1, rounds=12, starts=2)
def save_alone(run: Run) -> Sides:
    """Save 400 MB from one process, with hashes and fsync, against torch.distributed.checkpoint."""
    return _save(run)


@benchmark(ours="fleet.save", theirs="dcp.save", goal=SAVE_GOAL, ranks=2, rounds=12, starts=2)
def save_on_two(run: Run) -> Sides:
    """The same from two ranks that hold the same model."""
    return _save(run)


@benchmark(ours="fleet.save", theirs="dcp.save", ranks=1, rounds=12, starts=2)
def over_the_last(run: Run) -> Sides:
    """From one process, but torch writes over its last checkpoint, which a kill would destroy."""
    return _save(run, over_the_last=True)


@benchmark(ours="direct", theirs="page cache", ranks=1, rounds=12, starts=2)
def direct(run: Run) -> Sides:
    """400 MB in a new file, hashed and synced, by O_DIRECT and through the page cache; the last one is removed."""
    data = memoryview(torch.randn(MEGABYTES * 10**6 // 4).numpy())  # type: ignore[arg-type]
    root = Path(tempfile.mkdtemp(prefix="fleetx-benchmark-"))
    cpu: dict[str, list[float]] = {"ours": [], "theirs": []}

    def written(side: str, large: bool) -> None:
        began = time.process_time()
        (root / side).unlink(missing_ok=True)
        with HashingFile(root / side, large=large) as file:
            file.write(data)
            file.finish()
        cpu[side].append(time.process_time() - began)

    try:
        return run.compare(lambda: written("ours", True), lambda: written("theirs", False), cpu=cpu)
    finally:
        shutil.rmtree(root, ignore_errors=True)


@benchmark(ours="saving", theirs="not saving", budget=ADDED_SECONDS, ranks=1, rounds=8, starts=1, threads=2)
def background(run: Run) -> Sides:
    """110 million parameters: 10 steps with one save in the background, against 10 steps. Prints the stall."""
    model, optimizer = _armed(110_000_000, momentum=True)
    x = torch.randn(ROWS, 1024)
    root = Path(tempfile.mkdtemp(prefix="fleetx-benchmark-"))
    checkpoints = fleet.checkpoints(root, every=10**9, keep=1, asynchronous=True)
    stalls = []

    def steps(save: bool) -> None:
        for n in range(EVERY):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.stepped()
            if save and n == 0:
                began = time.perf_counter()
                checkpoints.save()
                stalls.append(time.perf_counter() - began)
        checkpoints._saver.wait()  # all that a save costs is on its own side

    def side(save: bool) -> Side:
        return clocked(lambda: steps(save), wait=lambda: None)

    try:
        ours, theirs = interleave(side(True), side(False), rounds=run.rounds, warm_up=1)
        return Sides(ours, theirs, notes={"stalls": stalls, "rows": ROWS})
    finally:
        checkpoints.close()
        shutil.rmtree(root, ignore_errors=True)
        middle = sorted(stalls)[len(stalls) // 2]
        print(f"a save stalls its step by {middle:.3f} s (most: {max(stalls):.3f}); goal {STALL_SECONDS}", flush=True)
