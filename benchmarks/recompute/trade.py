"""The trade-off of one model: peak memory and time of a step. Ours also runs with the memory of each other method."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.recompute import measured, methods
from benchmarks.recompute.measured import Row
from benchmarks.recompute.methods import Method
from benchmarks.recompute.models import MODELS
from fleetx.base.sizes import format_bytes
from fleetx.measure.fake_step import TrainingStep
from fleetx.parts.recompute import budget

SHARES = (0.75, 0.5, 0.25)  # between the minimum and the peak without recomputation


def rows(name: str, rounds: int) -> Iterator[Row]:
    model = MODELS[name]
    module, inputs = model.make(), model.inputs(model.batch)
    optimizer = measured.adamw(module)
    step = TrainingStep(module, optimizer, kwargs=inputs)
    planner = budget.Planner(step)
    before = planner.plain
    peers = [methods.every_block(model, module), methods.square_root(model, module)]
    peaks = {m.name: measured.peak(module, optimizer, inputs, m.active) for m in (methods.plain(), *peers)}
    least = planner.choose("min").peak
    limits = {format_bytes(peaks[method.name]) + f", as {method.name}": peaks[method.name] for method in peers}
    limits |= {f"{share:.0%} of the way": int(least + share * (before.peak - least)) for share in SHARES}
    half = before.fixed + before.activations // 2
    if least < half:
        limits["half of the activations"] = half
    limits["min"] = least
    chosen = [ours for title, bytes_ in limits.items() if (ours := _ours(module, planner, bytes_, title))]
    everything = [methods.plain(), *peers, *chosen]
    peaks |= {method.name: measured.peak(module, optimizer, inputs, method.active) for method in chosen}
    times = measured.seconds(module, inputs, everything, rounds)
    for method in everything:
        predicted = before.peak if method.name == "plain" else method.predicted
        yield {
            "model": name, "way": method.name, "title": method.title, "peak": peaks[method.name], "limit": method.limit,
            "predicted": predicted, "added": method.added, "fixed": before.fixed,
            "seconds": times[method.name], "batch": model.batch, "threads": torch.get_num_threads(),
        }  # fmt: skip


def _ours(module: torch.nn.Module, planner: budget.Planner, bytes_: int, title: str) -> Method | None:
    """None if ours does not fit into the memory of the other method: the table has no such row then."""
    try:
        return methods.ours(module, planner, f"{bytes_}B", title)
    except budget.StrategyError as error:
        print(f"{title}: {error}", flush=True)
        return None
