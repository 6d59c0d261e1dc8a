"""How long a step of fleetx.optim takes: in units of the memory that must be moved, and against others' optimizers.

The unit is a stream that reads 4 and writes 3 arrays as large as the parameters, 28 bytes a parameter, as AdamW does.
LAMB must move 40 bytes a parameter of a tensor that no cache holds and 28 of any other, LARS 28 and 20. The whole of
`optimizer.step()` is timed, Python included.

A name says optimizer, model, kernels or peer, and threads; `arena` where glibc may not give memory back to the system
between two steps, without which fresh pages are most of what a step with temporaries costs.
"""

from __future__ import annotations

from itertools import product
from statistics import median

from benchmarks.frame import Run, Sides, benchmark, interleave
from benchmarks.frame.interleave import clocked

KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}
MALLOCS = {"": {}, "_arena": KEEP}
MODELS = {"bert": "BERT-base", "resnet": "ResNet-50"}
GOALS = {("lamb", "compiled"): 1.6, ("lamb", "stock"): 3.0, ("lars", "compiled"): 1.25, ("lars", "stock"): 2.0}
PEERS = {"timm": "timm", "pytorch_optimizer": "pytorch_optimizer", "paddle": "Paddle"}
FIVE_TIMES_FASTER = 0.2


def in_units(run: Run, side: str, optimizer: str, model: str) -> Sides:
    import torch

    from benchmarks.optimizer_steps import sides
    from benchmarks.optimizer_steps.models import shapes
    from benchmarks.optimizer_steps.stream import BYTES, stream

    elements = sum(p.numel() for p in (torch.empty(s, device="meta") for s in shapes(model)))
    ours, walk = run.both(lambda: getattr(sides, side)(optimizer, shapes(model))[1].step, lambda: stream(elements))
    found = run.compare(ours, walk, parameters=elements, threads=torch.get_num_threads())
    found.notes["stream_gb_per_second"] = BYTES * elements / min(found.theirs) / 1e9
    return found


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
    """`python -m benchmarks.paddle_agreement` is what shows that both compute the same."""
    from benchmarks.optimizer_steps import sides
    from benchmarks.optimizer_steps.models import shapes
    from benchmarks.optimizer_steps.paddle_peer import Paddle

    paddle = Paddle(optimizer, shapes(model))
    _, ours = sides.fleetx(optimizer, shapes(model))
    a, b = interleave(clocked(ours.step, wait=lambda: None), paddle.timed("step"), rounds=run.rounds)
    steps, units = interleave(paddle.timed("step"), paddle.timed("stream"), rounds=4)
    in_units = median(x / y for x, y in zip(steps, units, strict=True))
    return Sides(a, b, notes={"paddle": paddle.version, "paddle_in_units_of_its_process": in_units})


def declare(name: str, meaning: str, function, *arguments: str, **options) -> None:
    """A benchmark of this module: what the table below says, as a function that other processes find by its name."""

    def measure(run: Run) -> Sides:
        return function(run, *arguments)

    measure.__name__ = measure.__qualname__ = name
    measure.__doc__ = meaning
    globals()[name] = benchmark(**options)(measure)


for (optimizer, kernels), model, threads, malloc in product(GOALS, MODELS, (1, 2), MALLOCS):
    declare(
        f"{optimizer}_{model}_{kernels}_{threads}{malloc}",
        f"{optimizer.upper()} on {MODELS[model]}, {kernels} kernels, threads: {threads}{', arena' if malloc else ''}.",
        in_units, "fleetx", optimizer, model,
        ours="fleetx", theirs="stream", goal=GOALS[optimizer, kernels], rounds=20, starts=1, threads=threads,
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
        f"torch's fused AdamW on {MODELS[model]}, threads: {threads}: how near to the limit the stream is.",
        in_units, "torch_adamw", "adamw", model,
        ours="AdamW", theirs="stream", rounds=20, starts=1, threads=threads,
    )  # fmt: skip
