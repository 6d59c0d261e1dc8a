"""The time of a step of fleetx.optim: relative to the memory traffic that it needs, and to other libraries.

The unit is a stream that reads 4 and writes 3 arrays of the size of the parameters, 28 bytes per parameter, like AdamW.
LAMB must move 40 bytes per parameter for tensors that do not fit in the cache and 28 for others; LARS 28 and 20. The
time is that of `optimizer.step()`, including Python.

A name consists of optimizer, model, kernels or peer, and threads. `arena` keeps glibc from returning memory to the
system between steps; without it, page faults take most of the time of a step with large temporaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks.frame import Run, Sides, benchmark, interleave
from benchmarks.frame.interleave import clocked

PAGE = "optimizers.md"
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}
MALLOCS = {"": {}, "_arena": KEEP}
MODELS = {"bert": "BERT-base", "resnet": "ResNet-50"}
KERNELS = ("compiled", "foreach")
GOALS = {("lamb", "compiled"): 1.6, ("lars", "compiled"): 1.25}  # none for foreach, the fallback
PEERS = {"timm": "timm", "pytorch_optimizer": "pytorch_optimizer", "paddle": "Paddle"}
FIVE_TIMES_FASTER = 0.2


def tables(out: Path) -> Iterator[str]:
    from benchmarks.optimizer_steps.tables import text

    return text(out)


def in_units(run: Run, side: str, optimizer: str, model: str, warm_up: int = 2) -> Sides:
    import torch

    from benchmarks.optimizer_steps import sides
    from benchmarks.optimizer_steps.models import shapes
    from benchmarks.optimizer_steps.stream import BYTES, stream

    elements = sum(p.numel() for p in (torch.empty(s, device="meta") for s in shapes(model)))
    step, unit = run.both(lambda: getattr(sides, side)(optimizer, shapes(model))[1].step, lambda: stream(elements))
    times = run.compare(step, unit, warm_up=warm_up, parameters=elements, threads=torch.get_num_threads())
    times.notes["stream_gb_per_second"] = BYTES * elements / min(times.theirs) / 1e9
    return times


def against(run: Run, peer: str, optimizer: str, model: str) -> Sides:
    from benchmarks.optimizer_steps import sides
    from benchmarks.optimizer_steps.models import shapes

    if peer == "paddle":
        return against_paddle(run, optimizer, model)
    theirs = getattr(sides, peer)
    if peer == "timm":
        sides.assert_same_step(optimizer, theirs)
    (_, a), (_, b) = run.both(lambda: sides.fleetx(optimizer, shapes(model)), lambda: theirs(optimizer, shapes(model)))
    return run.compare(a.step, b.step)


def against_paddle(run: Run, optimizer: str, model: str) -> Sides:
    """`python -m benchmarks.paddle_agreement` shows that both compute the same."""
    from benchmarks.optimizer_steps import sides
    from benchmarks.optimizer_steps.models import shapes
    from benchmarks.optimizer_steps.paddle_peer import Paddle

    paddle = Paddle(optimizer, shapes(model))
    _, ours = sides.fleetx(optimizer, shapes(model))
    a, b = interleave(clocked(ours.step, wait=lambda: None), paddle.timed("step"), rounds=run.rounds)
    steps, units = interleave(paddle.timed("step"), paddle.timed("stream"), rounds=4)
    in_units = median(x / y for x, y in zip(steps, units, strict=True))
    return Sides(a, b, notes={"paddle": paddle.version, "paddle_in_units_of_its_process": in_units})


def declare(name: str, meaning: str, function, *arguments: object, **options) -> None:
    """Add a benchmark to this module under a name by which other processes can find it."""

    def measure(run: Run) -> Sides:
        return function(run, *arguments)

    measure.__name__ = measure.__qualname__ = name
    measure.__doc__ = meaning
    globals()[name] = benchmark(**options)(measure)


for optimizer, kernels, model, threads, malloc in product(("lamb", "lars"), KERNELS, MODELS, (1, 2), MALLOCS):
    declare(
        f"{optimizer}_{model}_{kernels}_{threads}{malloc}",
        f"{optimizer.upper()} on {MODELS[model]}, {kernels} kernels, threads: {threads}{', arena' if malloc else ''}.",
        in_units, "fleetx", optimizer, model,
        ours="fleetx", theirs="stream", goal=GOALS.get((optimizer, kernels)), rounds=20, starts=1, threads=threads,
        environment={"FLEETX_KERNELS": kernels, **MALLOCS[malloc]},
    )  # fmt: skip

for optimizer, model, peer, malloc in product(("lamb", "lars"), MODELS, PEERS, MALLOCS):
    declare(
        f"{optimizer}_{model}_{peer}{malloc}",
        f"{optimizer.upper()} on {MODELS[model]} against {PEERS[peer]}, one thread{', arena' if malloc else ''}.",
        against, peer, optimizer, model,
        ours="fleetx", theirs=PEERS[peer], goal=FIVE_TIMES_FASTER, rounds=8, starts=1,
        environment={"FLEETX_KERNELS": "compiled", **MALLOCS[malloc]},
    )  # fmt: skip

for model, threads in product(MODELS, (1, 2)):
    declare(
        f"adamw_{model}_{threads}",
        f"torch's fused AdamW on {MODELS[model]}, threads: {threads}: how close the stream is to the limit.",
        in_units, "torch_adamw", "adamw", model,
        ours="AdamW", theirs="stream", rounds=20, starts=1, threads=threads,
    )  # fmt: skip
