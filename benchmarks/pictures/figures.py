"""What the three pictures show."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean, median
from typing import Any

from benchmarks.pictures.draw import OURS, THEIRS, Axes, Bar, Line, bars, lines, picture, text

Data = dict[str, Any]
GREEN = "#1a7f37"
COLOURS = {"sgd": THEIRS, "adamw": "#9a6700", "lars": OURS, "lamb": GREEN, "muon": "#cf222e"}
TITLES = {"sgd": "Nesterov SGD", "adamw": "AdamW", "lars": "LARS", "lamb": "LAMB", "muon": "Muon"}
MODELS = {"bert_large": "BERT-large, sequence 512", "resnet": "ResNet-50, 224 x 224", "bert": "BERT-base, sequence 128"}
SETTINGS = {
    "no recomputation": ("plain PyTorch", THEIRS),
    "memory_budget": ("recompute", OURS),
    "memory_budget, amp in bfloat16": ("recompute and amp", GREEN),
}
NETWORK = {
    "ddp": ("DDP", THEIRS),
    "fp16_hook": ("DDP, torch's fp16 hook", THEIRS),
    "power1": ("torch's PowerSGD, rank 1", THEIRS),
    "overlap": ("localsgd k=8, overlap", GREEN),
    "dgc32": ("dgc", OURS),
}
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", None: "not limited"}


def batch_against_memory(data: Data) -> str:
    """The largest batch that fits into the same memory."""
    groups = []
    for model, title in MODELS.items():
        found = {x["setting"]: x for x in data["batches"] if x["model"] == model and x["setting"] in SETTINGS}
        plain = found["no recomputation"]
        group = []
        for setting, (name, colour) in SETTINGS.items():
            x = found[setting]
            label = f"{x['batch']}" + ("" if x is plain else f" ({x['batch'] / plain['batch']:.1f} x)")
            if x is not plain:
                ratio = median(x["seconds"]) / x["batch"] / (median(x["without"]) / x["beside"])
                label += f"; time per sample {ratio:.2f} x"
            group.append(Bar(name, x["batch"], label, colour))
        groups.append((f"{title}, within {plain['memory'].replace('GiB', ' GiB')}", group))
    parts, end = bars(groups, top=72, left=170, right=440)
    return picture(
        "The largest batch that fits into the same memory", "samples per step; measured on a CPU", end, parts
    )


def accuracy_against_batch(data: Data) -> str:
    """Test scores when the same epochs are trained in larger batches: one panel per task."""
    images, words = data["tasks"]["images"], data["tasks"]["text"]
    accuracy = _panel(images, lambda score: 100 * score, [(a, f"{a} %") for a in range(80, 91, 2)], top=92, bottom=272)
    perplexity = _panel(
        words, lambda score: math.exp(-score), [(x, str(x)) for x in (4, 8, 12, 16, 20)], top=344, bottom=504
    )
    headings = [
        text(16, 78, "Fashion-MNIST: accuracy", bold=True),
        text(16, 330, "Python's manual: perplexity, lower is better", bold=True),
    ]
    under = (
        f"mean of {images['plan']['seeds']} seeds, against the share of the data in each update; rate and decay tuned"
    )
    title = f"The same {images['plan']['epochs']} epochs in larger batches"
    return picture(title, under, 540, [*headings, *accuracy, *perplexity])


def _panel(
    task: Data, value: Callable[[float], float], ticks: list[tuple[float, str]], *, top: float, bottom: float
) -> list[str]:
    """`top` is where the last tick is, and `bottom` where the first one is."""
    points: dict[str, list[tuple[float, float]]] = {}
    for cell in task["cells"]:
        points.setdefault(cell["optimizer"], []).append((cell["share"], value(mean(cell["tests"]))))
    shares = sorted({x for line in points.values() for x, _ in line})
    first, last, low, high = math.log(shares[0]), math.log(shares[-1]), ticks[0][0], ticks[-1][0]
    axes = Axes(
        x=lambda s: 80 + (math.log(s) - first) / (last - first) * 480,
        y=lambda v: bottom - (v - low) / (high - low) * (bottom - top),
        x_ticks=[(s, f"{100 * s:g} %") for s in shares],
        y_ticks=ticks,
        left=60, right=570, bottom=max(top, bottom),
    )  # fmt: skip
    return lines(axes, [Line(TITLES[name], sorted(line), COLOURS[name]) for name, line in points.items()], names_at=-1)


def time_against_bandwidth(data: Data) -> str:
    """Seconds of a step of ResNet-50's gradients on two hosts."""
    drawn = []
    for way, (name, colour) in NETWORK.items():
        seconds: dict[str | None, list[float]] = {rate: [] for rate in RATES}
        for x in data["steps"]:
            if x["model"] == "resnet" and x["way"] == way and x["rate"] in RATES:
                seconds[x["rate"]] += x["seconds"]
        points = [(i, median(seconds[rate])) for i, rate in enumerate(RATES)]
        drawn.append(Line(f"{name}: {_seconds(points[0][1])}", points, colour, dashed=colour == THEIRS))
    axes = Axes(
        x=lambda i: 270 + i * 180,
        y=lambda s: 310 - (math.log10(s) - math.log10(0.05)) / (math.log10(10) - math.log10(0.05)) * 230,
        x_ticks=list(enumerate(RATES.values())),
        y_ticks=[(s, _seconds(s)) for s in (0.1, 0.3, 1, 3, 10)],
        left=250, right=650, bottom=310,
    )  # fmt: skip
    under = "seconds per step with the gradients of ResNet-50, two hosts; dashed: torch's own"
    return picture("A step on a slow network", under, 350, lines(axes, drawn, names_at=0))


def _seconds(value: float) -> str:
    return f"{value:.2g} s"


PICTURES: dict[str, tuple[str, Callable[[Data], str]]] = {
    "batch_memory": ("recompute", batch_against_memory),
    "accuracy_batch": ("large_batch", accuracy_against_batch),
    "step_bandwidth": ("slow_network", time_against_bandwidth),
}
