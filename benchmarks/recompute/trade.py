"""The trade-off of one model: peak bytes and time of a step. Ours also at the very bytes of each peer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.recompute import measured, ways
from benchmarks.recompute.measured import Row
from benchmarks.recompute.models import MODELS
from benchmarks.recompute.ways import Way
from fleetx.base.sizes import words
from fleetx.measure.fake_step import Step
from fleetx.parts.recompute import budget

SHARES = (0.75, 0.5, 0.25)  # between the least and what it takes without recomputation


def rows(name: str, rounds: int) -> Iterator[Row]:
    model = MODELS[name]
    module, inputs = model.make(), model.inputs(model.batch)
    optimizer = measured.adamw(module)
    step = Step(module, optimizer, kwargs=inputs)
    planner = budget.Planner(step)
    before = planner.plain
    peers = [ways.every_block(model, module), ways.square_root(model, module)]
    peaks = {way.name: measured.peak(module, optimizer, inputs, way.active) for way in (ways.plain(), *peers)}
    least = planner.choose("min").peak
    limits = {words(peaks[way.name]) + f", as {way.name}": peaks[way.name] for way in peers}
    limits |= {f"{share:.0%} of the way": int(least + share * (before.peak - least)) for share in SHARES}
    half = before.fixed + before.activations // 2
    if least < half:
        limits["half of the activations"] = half
    limits["min"] = least
    chosen = [ours for title, bytes_ in limits.items() if (ours := _ours(module, planner, bytes_, title))]
    everything = [ways.plain(), *peers, *chosen]
    peaks |= {way.name: measured.peak(module, optimizer, inputs, way.active) for way in chosen}
    times = measured.seconds(module, inputs, everything, rounds)
    for way in everything:
        predicted = before.peak if way.name == "plain" else way.predicted
        yield {
            "model": name, "way": way.name, "title": way.title, "peak": peaks[way.name], "limit": way.limit,
            "predicted": predicted, "added": way.added, "fixed": before.fixed,
            "seconds": times[way.name], "batch": model.batch, "threads": torch.get_num_threads(),
        }  # fmt: skip


def _ours(module: torch.nn.Module, planner: budget.Planner, bytes_: int, title: str) -> Way | None:
    """None where it cannot be met: a peer may need less than we can, and then the table has no such line."""
    try:
        return ways.ours(module, planner, f"{bytes_}B", title)
    except budget.StrategyError as error:
        print(f"{title}: {error}", flush=True)
        return None
