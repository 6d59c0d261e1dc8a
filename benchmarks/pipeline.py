"""What a pipeline of two stages gains over one process that runs the same micro-batches one after another.

Each rank has one thread. The bubble formula allows p * m / (m + p - 1) = 1.6 for p = 2 and m = 4, schedules without
bubbles up to 2. `limit` is what the machine itself allows: both ranks work independently of each other. A goal of 0.95
of 1.6 is a ratio of 1 / 1.52 = 0.658; one of 0.9 of 2 is 1 / 1.8 = 0.556.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

from benchmarks.frame import Run, Sides, benchmark
from benchmarks.frame.pages import row
from fleetx import fleet

PAGE = "pipeline.md"
DEPTH, WIDTH, HEADS, LENGTH, MICRO, NUMBER = 8, 512, 8, 64, 4, 4
# Keep memory between steps, so that page faults, with which two processes slow each other down, are not timed.
HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}
ALIKE = [4 * WIDTH] * DEPTH
UNEVEN = [4 * WIDTH, 12 * WIDTH, 4 * WIDTH, WIDTH, WIDTH, 8 * WIDTH, WIDTH, 2 * WIDTH]


def model(wide: list[int] = ALIKE) -> nn.Sequential:
    """Transformer blocks with feed-forward parts of these widths."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, HEADS, w, dropout=0.0, batch_first=True) for w in wide))


def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, NUMBER * MICRO, LENGTH, WIDTH, generator=g)
    return x, y


def alone(module: nn.Module) -> Callable[[], None]:
    """The same micro-batches in one process, one after another."""
    x, y = batch()

    def step() -> None:
        for a, b in zip(x.chunk(NUMBER), y.chunk(NUMBER), strict=True):
            (mse_loss(module(a), b) / NUMBER).backward()
        module.zero_grad()

    return step


def piped(mode: str, starts: list[str] | None, wide: list[int] = ALIKE) -> tuple[nn.Module, Callable[[], None]]:
    fleet.init()
    made = model(wide)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
    config = {"micro_batch": NUMBER, "schedule_mode": mode, "stages": starts or []}
    made, _ = fleet.distribute(made, optimizer, fleet.DistributedStrategy(pipeline=config))
    x, y = batch()

    def step() -> None:
        fleet.forward_backward(x, y, loss_fn=mse_loss, model=made)
        optimizer.zero_grad()

    return made, step


def compare(run: Run, mode: str, starts: list[str]) -> Sides:
    _, ours = piped(mode, starts)
    theirs = alone(model()) if run.rank == 0 else nothing
    return run.compare(ours, theirs, schedule=mode)


def nothing() -> None:
    pass


TWO, FOUR = ["4"], ["2", "4", "6"]


@benchmark(ours="pipeline", theirs="one process", goal=1 / 1.52, ranks=2, environment=HEAP, rounds=16, starts=2)
def one_f_one_b(run: Run) -> Sides:
    """1F1B, two stages, four micro-batches."""
    return compare(run, "1F1B", TWO)


@benchmark(ours="pipeline", theirs="one process", ranks=2, environment=HEAP, rounds=12, starts=1)
def f_then_b(run: Run) -> Sides:
    """F-then-B, two stages, four micro-batches."""
    return compare(run, "F-then-B", TWO)


@benchmark(ours="pipeline", theirs="one process", ranks=2, environment=HEAP, rounds=12, starts=1)
def interleaved(run: Run) -> Sides:
    """Interleaved1F1B, two stages on each of two ranks."""
    return compare(run, "Interleaved1F1B", FOUR)


@benchmark(ours="pipeline", theirs="one process", ranks=2, environment=HEAP, rounds=12, starts=1)
def looped(run: Run) -> Sides:
    """LoopedBFS, two stages on each of two ranks."""
    return compare(run, "LoopedBFS", FOUR)


@benchmark(ours="pipeline", theirs="one process", ranks=2, environment=HEAP, rounds=12, starts=1)
def interleaved_zero_bubble(run: Run) -> Sides:
    """InterleavedZeroBubble, two stages on each of two ranks."""
    return compare(run, "InterleavedZeroBubble", FOUR)


@benchmark(ours="pipeline", theirs="one process", goal=1 / 1.8, ranks=2, environment=HEAP, rounds=16, starts=2)
def zero_bubble_v(run: Run) -> Sides:
    """ZBVZeroBubble, two stages on each of two ranks."""
    return compare(run, "ZBVZeroBubble", FOUR)


@benchmark(ours="pipeline", theirs="one process", ranks=2, environment=HEAP, rounds=12, starts=1)
def dual_pipe_v(run: Run) -> Sides:
    """DualPipeV, two stages on each of two ranks."""
    return compare(run, "DualPipeV", FOUR)


def by_hand(run: Run) -> Callable[[], None]:
    """torch's own interface: the model is cut by hand."""
    full = model()
    half = full[:4] if run.rank == 0 else full[4:]
    x, y = batch()
    stage = PipelineStage(nn.Sequential(*half), run.rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUMBER, loss_fn=mse_loss)

    def step() -> None:
        schedule.step(x) if run.rank == 0 else schedule.step(target=y, losses=[])
        half.zero_grad()

    return step


@benchmark(ours="torch's schedule", theirs="one process", ranks=2, environment=HEAP, rounds=12, starts=1)
def bare_torch(run: Run) -> Sides:
    """torch's Schedule1F1B on a model that was cut by hand."""
    return run.compare(by_hand(run), alone(model()) if run.rank == 0 else nothing)


@benchmark(ours="pipeline", theirs="torch's schedule", ranks=2, environment=HEAP, rounds=16, starts=2)
def beside_torch(run: Run) -> Sides:
    """1F1B, compared with torch's Schedule1F1B on a model that was cut by hand."""
    return run.compare(piped("1F1B", TWO)[1], by_hand(run))


@benchmark(ours="both at work", theirs="one process", ranks=2, environment=HEAP, rounds=12, starts=1)
def limit(run: Run) -> Sides:
    """Half of the work on each rank without communication: what the machine allows."""
    mine = model()[:4]

    def half() -> None:
        alone(mine)()
        dist.barrier()

    return run.compare(half, alone(model()) if run.rank == 0 else nothing)


@benchmark(
    ours="automatic cut",
    theirs="best cut",
    goal=1.05,
    ranks=2,
    environment=HEAP,
    rounds=8,
    starts=1,
    seconds=900,
)
def split(run: Run) -> Sides:
    """Two stages of uneven blocks: the automatic cut, compared with all seven possible cuts."""
    cuts = {start: piped("1F1B", [start], UNEVEN)[1] for start in map(str, range(1, DEPTH))}
    module, ours = piped("1F1B", None, UNEVEN)
    ours()
    times: dict[str, list[float]] = {start: [] for start in cuts}
    for _ in range(3):
        for start, step in cuts.items():
            dist.barrier()
            begun = time.perf_counter()
            step()
            times[start].append(time.perf_counter() - begun)
    found = torch.tensor([median(times[start]) for start in cuts])
    dist.broadcast(found, 0)  # the ranks must agree on the best
    best = list(cuts)[int(found.argmin())]
    chosen = next(w for w in str(fleet.explain(model=module)).splitlines() if "stages begin with" in w).split()[-1]
    notes = {"chosen": chosen, "best": best, "seconds": {s: t.item() for s, t in zip(cuts, found, strict=True)}}
    return run.compare(ours, cuts[best], **notes)


# --- the tables of the page ------------------------------------------------------------------------
def allowed(stages: int) -> float:
    """The speed-up that the bubble formula allows two ranks with so many stages each."""
    return 2 * NUMBER * stages / (NUMBER * stages + 1)


SCHEDULES = {
    "one_f_one_b": ("1F1B", allowed(1)),
    "f_then_b": ("F-then-B", allowed(1)),
    "interleaved": ("Interleaved1F1B", allowed(2)),
    "looped": ("LoopedBFS", allowed(2)),
    "interleaved_zero_bubble": ("InterleavedZeroBubble", 2.0),
    "zero_bubble_v": ("ZBVZeroBubble", 2.0),
    "dual_pipe_v": ("DualPipeV", 2.0),
}
SHOWN = SCHEDULES | {
    "bare_torch": ("torch's Schedule1F1B, cut by hand", allowed(1)),
    "limit": ("`limit`, no communication", 2.0),
}


def tables(out: Path) -> Iterator[str]:
    found = {name: json.loads((out / f"pipeline.{name}.json").read_text()) for name in (*SHOWN, "split")}
    head = ["schedule", "ratio", "95 %", "speed-up", "share of the formula's limit", "share of this machine's limit"]
    yield from (row(*head), row("---", *["---:"] * 5))
    for name, (title, most) in SHOWN.items():
        yield row(title, *_gains(found[name], most, found["limit"], of_limit=name == "limit"))
    yield ""
    yield from (row("goal", "reached", "verdict"), row("---", "---", "---"))
    yield from _goals(found)


def _gains(result: dict[str, Any], most: float, limit: dict[str, Any], *, of_limit: bool) -> list[str]:
    ratio = result["ratio"]
    if ratio is None:
        return [result["verdict"], "", "", "", ""]
    share = 1 / ratio / most
    machine = "1" if of_limit else f"{share * 2 * limit['ratio']:.2f}" if limit["ratio"] else ""
    return [f"{ratio:.3f}", _interval(result), f"{1 / ratio:.2f}", f"{share:.2f} of {most:.3g}", machine]


def _interval(result: dict[str, Any]) -> str:
    return f"{result['statistics']['low']:.3f} - {result['statistics']['high']:.3f}"


def _goals(found: dict[str, Any]) -> Iterator[str]:
    plain, bubbles, cut = (found[name] for name in ("one_f_one_b", "zero_bubble_v", "split"))
    most = allowed(1)
    reached = ""
    if plain["ratio"] is not None:
        least, best = (1 / plain["statistics"][key] / most for key in ("high", "low"))
        reached = f"{1 / plain['ratio'] / most:.2f}; interval {least:.2f} to {best:.2f}"
    yield row(f"1F1B at least 0.95 of the formula (ratio at most {plain['goal']:.3f})", reached, _verdict(plain))
    reached = "" if bubbles["ratio"] is None else f"{1 / bubbles['ratio'] / 2:.2f} p"
    yield row(f"zero-bubble V at least 0.9 p (ratio at most {bubbles['goal']:.3f})", reached, _verdict(bubbles))
    ran = sum(found[name]["ratio"] is not None for name in SCHEDULES)
    whole = ran == len(SCHEDULES)
    words = ("all of them", "met") if whole else (f"{ran} of {len(SCHEDULES)}", "**not met**")
    yield row("all seven of torch's schedules on gloo", *words)
    figures = "" if cut["ratio"] is None else f" ({cut['ratio']:.3f}, {_interval(cut)})"
    yield row("the automatic cut within 5 % of the best cut", "see below", _verdict(cut) + figures)


def _verdict(result: dict[str, Any]) -> str:
    if result["verdict"] == "too noisy":
        return "**not shown**: too noisy" + ", and the median misses it" * (result["ratio"] > result["goal"])
    return {"not met": "**not met**"}.get(result["verdict"], result["verdict"])
