"""Predictions for another cluster, from the stored profile of a model and the links of that cluster."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fleetx.base.sizes import format_bytes
from fleetx.errors import StrategyError
from fleetx.planner import plots
from fleetx.planner.cache import StoredProfile
from fleetx.planner.candidates import Candidate, offered, seconds_on
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.cost_model import Cluster, Link
from fleetx.strategy.part import switch_of

NOTE = (
    "This is a prediction: nothing below was run. It assumes that compute is {speed:g} times as fast as in the "
    "profile, and that links are as stated."
)
_UNITS = {"bit": 1 / 8, "b": 1 / 8, "B": 1.0}
_POWERS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def speed(text: str) -> float:
    """'25GB/s' or '100Mbit/s' -> bytes per second. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kKMGT]?)(bit|B|b)(/s|ps)?\s*", text)
    if not match or not 0 < float(match[1]) < math.inf:
        raise ValueError(f"{text!r} is not a speed such as '25GB/s' or '100Mbit/s'")
    return float(match[1]) * _POWERS[match[2]] * _UNITS[match[3]]


@dataclass(frozen=True)
class Machine:
    """The cluster in question. Speeds in bytes per second, latency in seconds."""

    nodes: int
    per_node: int
    link: float  # between nodes
    inner: float  # within a node
    memory: int  # bytes per rank
    latency: float = 2e-5
    compute: float = 1.0  # times as fast as in the profile
    global_batch: int | None = None

    def cluster(self, nodes: int, profiled: Cluster) -> Cluster:
        """A ring through all ranks crosses the slowest link of each node once in each direction."""
        ranks = nodes * self.per_node
        inner, outer = Link(self.latency, self.inner), Link(self.latency, self.link)
        slowest = outer if nodes > 1 else inner
        passed = 2 * (ranks - 1) / ranks if ranks > 1 else 1.0
        busy = profiled.all_reduce.busy / self.compute if profiled.device == "cpu" else 0.0
        all_reduce = Link(2 * (ranks - 1) * slowest.latency, slowest.speed / passed, busy)
        half = Link(all_reduce.latency / 2, 2 * all_reduce.speed, busy / 2)
        return Cluster(
            ranks, self.per_node, all_reduce, half, half, inner, slowest, profiled.bandwidth * self.compute,
            self.memory, {}, profiled.device, self.global_batch,
        )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The best plan on this many nodes, or None if none fits."""

    nodes: int
    ranks: int
    best: Candidate | None
    least: int  # bytes of the plan that needs the least

    @property
    def rate(self) -> float:
        """Samples per second."""
        return _rate(self.best) if self.best is not None else 0.0


def rows(machine: Machine, stored: StoredProfile, *, allow: str) -> list[Row]:
    counts = sorted({machine.nodes, *(1 << i for i in range(machine.nodes.bit_length()))})
    return [_row(machine, nodes, stored, allow) for nodes in counts]


def _row(machine: Machine, nodes: int, stored: StoredProfile, allow: str) -> Row:
    cluster, candidates = _candidates(machine, nodes, stored, allow)
    fitting = [candidate for candidate in candidates if candidate.cost.peak <= cluster.memory]
    least = min((candidate.cost.peak for candidate in candidates), default=0)
    return Row(nodes, cluster.ranks, max(fitting, key=_rate, default=None), least)


def _candidates(machine: Machine, nodes: int, stored: StoredProfile, allow: str) -> tuple[Cluster, list[Candidate]]:
    cluster, profile = machine.cluster(nodes, stored.cluster), stored.model.faster(machine.compute)
    params = [torch.empty(shape, device="meta", requires_grad=True) for shape in profile.shapes]
    strategy = DistributedStrategy(**stored.declared)
    # budgets=False: without the model, nothing is known about what a memory budget would choose.
    return cluster, [
        candidate for candidate in offered(strategy, cluster, profile, params, allow=allow, budgets=False)
        if not profile.forward_with(candidate.plan.parts).error
    ]  # fmt: skip


def _rate(candidate: Candidate) -> float:
    return candidate.total / candidate.cost.seconds


_PLAIN = "data parallelism"
_NETWORK = ("bytes_sent", "most_bytes_sent", "ranks_apart", "updates", "bytes_held")  # quantities of an Effect


@dataclass(frozen=True)
class Curve:
    """Strategies that affect network traffic, and the best rate with them at each speed of the link between nodes."""

    name: str
    rates: dict[float, float]  # samples per second, by bytes per second


def curves(machine: Machine, stored: StoredProfile, *, allow: str) -> list[Curve]:
    """The strategies that are best at some speed, slowest link first, and data parallelism."""
    cluster, candidates = _candidates(machine, machine.nodes, stored, allow)
    fitting = [candidate for candidate in candidates if candidate.cost.peak <= cluster.memory]
    profile = stored.model.faster(machine.compute)
    clusters = {link: replace(machine, link=link).cluster(machine.nodes, stored.cluster) for link in _links(machine)}
    best: dict[str, dict[float, float]] = {}
    for candidate in fitting:
        rates = best.setdefault(_noticed(candidate), dict.fromkeys(clusters, 0.0))
        for link, there in clusters.items():
            rates[link] = max(rates[link], candidate.total / seconds_on(there, candidate, profile))
    winners = [max(best, key=lambda name: best[name][link]) for link in clusters if best]
    return [Curve(name, best[name]) for name in dict.fromkeys([*winners, _PLAIN]) if name in best]


def _links(machine: Machine) -> list[float]:
    """Two decades to either side of the stated bandwidth."""
    return [machine.link * 10 ** (half / 2) for half in range(-4, 5)]


def _noticed(candidate: Candidate) -> str:
    parts = {switch_of(type(part)): part for part in candidate.plan.parts if not part.always}
    names = [name for name, part in parts.items() if part.effect and part.effect.quantity in _NETWORK]
    return " + ".join(names) or _PLAIN


def crossovers(found: Sequence[Curve]) -> Iterator[tuple[float, Curve]]:
    """(bytes per second, the curve that is best from there on), slowest link first. The first curve starts at 0."""
    best, before = None, 0.0
    for link in found[0].rates:
        winner = max(found, key=lambda curve: curve.rates[link])
        if winner is not best:
            yield (0.0 if best is None else _meeting(best, winner, before, link)), winner
        best, before = winner, link


def _meeting(a: Curve, b: Curve, before: float, after: float) -> float:
    """Where two curves meet between two speeds; both are nearly straight if both axes are logarithmic."""
    lead, lag = (math.log(one.rates[at] / other.rates[at]) for one, other, at in ((a, b, before), (b, a, after)))
    return float(before * (after / before) ** (lead / (lead + lag))) if lead + lag else after


def speed_text(bytes_per_second: float) -> str:
    """1.25e7 -> '100 Mbit/s'"""
    bits = 8 * bytes_per_second
    unit, power = next(
        (u, p) for u, p in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0)) if bits >= p or not u
    )
    return f"{bits / power:.3g} {unit}bit/s"


def by_link(machine: Machine, found: Sequence[Curve]) -> str:
    """Which strategies are best on which links, in words."""
    lines = [f"best with {machine.nodes} nodes, by the bandwidth between them:"]
    parts = [*crossovers(found)]
    ends = [start for start, _ in parts[1:]] + [0.0]
    for (start, curve), end in zip(parts, ends, strict=True):
        where = f"{speed_text(start)} or more" if start else ""
        if end:
            where = f"{speed_text(start)} to {speed_text(end)}" if start else f"less than {speed_text(end)}"
        lines.append(f"  {where or 'any':28}{curve.name}")
    return "\n".join(lines)


def text(machine: Machine, found: Sequence[Row]) -> str:
    most = max((row.rate for row in found), default=0.0)
    first = next((row for row in found if row.rate), None)
    lines = [NOTE.format(speed=machine.compute), ""]
    for row in found:
        head = f"{row.nodes:5} nodes  {row.ranks:6} ranks  "
        if row.best is None or first is None:
            lines.append(
                f"{head}nothing fits into {format_bytes(machine.memory)}: the least is {format_bytes(row.least)}"
            )
            continue
        scaling = row.rate / first.rate / (row.ranks / first.ranks)
        bar = "#" * max(round(40 * row.rate / most), 1)
        lines.append(
            f"{head}{row.rate:12,.1f} samples/s  {scaling:5.0%} of linear  "
            f"limited by {row.best.cost.bottleneck(machine.memory):8}  {bar}"
        )
        lines.append(f"{'':14}{row.best.title}; {row.best.equation}; {format_bytes(row.best.cost.peak)}")
    return "\n".join(lines)


def plot(machine: Machine, found: Sequence[Row], links: Sequence[Curve], path: Path) -> None:
    """Throughput against nodes and, with several nodes, against the bandwidth between them."""
    best = [(row.nodes, row.rate, row.best.cost) for row in found if row.best is not None]
    if not best:
        raise StrategyError("nothing to plot: no plan fits")
    nodes, rates, _ = zip(*best, strict=True)
    axis, *others = plots.axes(1 + bool(links), (7 + 7 * bool(links), 5))
    axis.plot(nodes, rates, "o-", label="predicted")
    axis.plot(nodes, [rates[0] * n / nodes[0] for n in nodes], ":", color="grey", label="linear")
    for n, rate, cost in best:
        axis.annotate(cost.bottleneck(1 << 62), (n, rate), textcoords="offset points", xytext=(4, -12))
    plots.finish(axis, nodes, xlabel="nodes", ylabel="samples per second (predicted)")
    for other in others:
        for curve in links:
            other.plot(list(curve.rates), list(curve.rates.values()), "o-", markersize=3, label=curve.name)
        other.axvline(machine.link, color="black", linestyle=":", linewidth=1, label="--link")
        marks = _links(machine)[::2]
        words = [speed_text(mark) for mark in marks]
        title = f"bandwidth between {machine.nodes} nodes"
        plots.finish(other, marks, words, xlabel=title, ylabel="samples per second (predicted)")
    plots.save(axis, path)
