"""The results of optimizers.py as the tables of docs/results/optimizers.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.frame.pages import heading, row
from benchmarks.optimizers import GOALS, KERNELS, MALLOCS, MODELS, PEERS

MALLOC_WORDS = {"": "default", "_arena": "arena"}


def text(out: Path) -> Iterator[str]:
    yield from heading("optimizer", "model", "threads", "malloc", *KERNELS)
    for optimizer, model, threads, malloc in (
        (o, m, t, a) for o in ("lamb", "lars") for m in MODELS for t in (1, 2) for a in MALLOCS
    ):
        cells = [_cell(out, f"{optimizer}_{model}_{kernels}_{threads}{malloc}") for kernels in KERNELS]
        yield row(optimizer.upper(), MODELS[model], str(threads), MALLOC_WORDS[malloc], *cells)
    for (optimizer, _), goal in GOALS.items():
        yield row(f"goal for {optimizer.upper()}", "", "", "", f"≤ {goal:g}", "")
    yield ""
    yield from heading("optimizer", "model", "malloc", *(f"ours / {word}" for word in PEERS.values()))
    for optimizer, model, malloc in ((o, m, a) for o in ("lamb", "lars") for m in MODELS for a in MALLOCS):
        cells = [_cell(out, f"{optimizer}_{model}_{peer}{malloc}") for peer in PEERS]
        yield row(optimizer.upper(), MODELS[model], MALLOC_WORDS[malloc], *cells)
    yield ""
    yield from heading("torch's fused AdamW", *(f"threads: {threads}" for threads in (1, 2)))
    for model in MODELS:
        yield row(MODELS[model], *(_cell(out, f"adamw_{model}_{threads}") for threads in (1, 2)))


def _cell(out: Path, name: str) -> str:
    path = out / f"optimizers.{name}.json"
    if not path.exists():
        return "not measured"
    result = _read(path)
    if result["ratio"] is None:
        return result["verdict"]
    digits = 3 if result["ratio"] < 1 else 2
    low, high = (f"{result['statistics'][key]:.{digits}f}" for key in ("low", "high"))
    return f"{result['ratio']:.{digits}f} ({low}-{high}) {result['verdict'].replace('reported', '')}".strip()


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
