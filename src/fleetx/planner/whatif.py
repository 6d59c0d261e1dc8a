"""What would it be like there? Predictions, from the stored probe of a model and the links of another machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fleetx.base.sizes import format_bytes
from fleetx.errors import StrategyError, UsageError
from fleetx.planner.candidates import Candidate, offered
from fleetx.planner.cost import StepCost, account, terms_of
from fleetx.planner.model_profile import Work
from fleetx.planner.workload import name
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.cost_model import Cluster, Link

PLAINLY = "A prediction: nothing below was run. Compute is the probe's, {speed:g} times as fast; links are as stated."
_UNITS = {"bit": 1 / 8, "b": 1 / 8, "B": 1.0}
_POWERS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def speed(text: str) -> float:
    """'25GB/s', '100Mbit/s' -> bytes a second. Raises ValueError."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kKMGT]?)(bit|B|b)(/s|ps)?\s*", text)
    if not found or not float(found[1]):
        raise ValueError(f"{text!r} is not a speed such as '25GB/s' or '100Mbit/s'")
    return float(found[1]) * _POWERS[found[2]] * _UNITS[found[3]]


@dataclass(frozen=True)
class Machine:
    """What is asked about. Speeds in bytes a second, latencies in seconds."""

    nodes: int
    per_node: int
    link: float  # between nodes
    inner: float  # inside of a node
    memory: int  # bytes of a rank
    latency: float = 2e-5
    compute: float = 1.0  # times as fast as where the probe ran
    global_batch: int | None = None

    def cluster(self, nodes: int, probed: Cluster) -> Cluster:
        """A ring through all ranks goes once over the slowest link of each node, there and back."""
        ranks = nodes * self.per_node
        inner, outer = Link(self.latency, self.inner), Link(self.latency, self.link)
        slowest = outer if nodes > 1 else inner
        passed = 2 * (ranks - 1) / ranks if ranks > 1 else 1.0
        busy = probed.flat.busy / self.compute if probed.device == "cpu" else 0.0
        flat = Link(2 * (ranks - 1) * slowest.latency, slowest.speed / passed, busy)
        half = Link(flat.latency / 2, 2 * flat.speed, busy / 2)
        return Cluster(
            ranks, self.per_node, flat, half, half, inner, outer if nodes > 1 else inner,
            probed.stream * self.compute, self.memory, {}, probed.device, self.global_batch,
        )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The best plan on so many nodes; none where nothing fits."""

    nodes: int
    ranks: int
    best: Candidate | None
    account: StepCost | None
    least: int  # bytes of the plan that takes least

    @property
    def rate(self) -> float:
        """Samples a second."""
        return 0.0 if self.best is None or self.account is None else _rate(self.best, self.account)


def rows(machine: Machine, probed: Cluster, work: Work, declared: dict[str, Any], *, allow: str) -> list[Row]:
    counts = sorted({machine.nodes, *(1 << i for i in range(machine.nodes.bit_length()))} - {0})
    return [_row(machine, nodes, probed, work, declared, allow) for nodes in counts if nodes <= machine.nodes]


def _row(machine: Machine, nodes: int, probed: Cluster, work: Work, declared: dict[str, Any], allow: str) -> Row:
    cluster = machine.cluster(nodes, probed)
    work = work.faster(machine.compute)
    found = []
    params = [torch.empty(shape, device="meta", requires_grad=True) for shape in work.shapes]
    # What a budget of bytes chooses cannot be known without the model.
    for candidate in offered(DistributedStrategy(**declared), cluster, work, allow=allow, budgets=False):
        way = work.way(name(candidate.plan.parts))
        if not way.error:
            kept = candidate.keeps(params)
            found.append((candidate, account(candidate.terms, work, way, candidate.feed, kept=kept)))
    fitting = [(c, a) for c, a in found if a.peak <= cluster.memory]
    least = min((a.peak for _, a in found), default=0)
    best = max(fitting, key=lambda pair: _rate(*pair), default=None)
    return Row(nodes, cluster.ranks, best[0] if best else None, best[1] if best else None, least)


def _rate(candidate: Candidate, found: StepCost) -> float:
    return candidate.feed * candidate.terms.merged * candidate.terms.replicas / found.seconds


def plain(machine: Machine, probed: Cluster, work: Work, declared: dict[str, Any]) -> StepCost:
    """What was declared, as it is, on all nodes."""
    cluster, work = machine.cluster(machine.nodes, probed), work.faster(machine.compute)
    terms = terms_of(DistributedStrategy(**declared).plan().parts, cluster, work)
    return account(terms, work, work.way(""), work.samples)


def text(machine: Machine, found: Sequence[Row]) -> str:
    most = max((row.rate for row in found), default=0.0)
    lines = [PLAINLY.format(speed=machine.compute), ""]
    first = next((row for row in found if row.rate), None)
    for row in found:
        if row.best is None or row.account is None:
            lines.append(
                f"{row.nodes:5} nodes  {row.ranks:6} ranks  nothing fits into {format_bytes(machine.memory)}: the "
                f"least is {format_bytes(row.least)}"
            )
            continue
        assert first is not None
        scaling = row.rate / first.rate / (row.ranks / first.ranks)
        bar = "#" * max(round(40 * row.rate / most), 1)
        lines.append(
            f"{row.nodes:5} nodes  {row.ranks:6} ranks  {row.rate:12,.1f} samples/s  {scaling:5.0%} of linear  "
            f"limited by {row.account.limit(machine.memory):8}  {bar}"
        )
        lines.append(f"{'':14}{row.best.title}; {row.best.equation}; {format_bytes(row.account.peak)}")
    return "\n".join(lines)


def plot(found: Sequence[Row], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise UsageError("a plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [row for row in found if row.rate]
    if not good:
        raise StrategyError("there is nothing to draw: no plan fits")
    figure, axis = pyplot.subplots(figsize=(7, 5))
    axis.plot([row.nodes for row in good], [row.rate for row in good], "o-", label="predicted")
    linear = [good[0].rate * row.nodes / good[0].nodes for row in good]
    axis.plot([row.nodes for row in good], linear, ":", color="grey", label="linear")
    for row in good:
        assert row.account is not None
        axis.annotate(row.account.limit(1 << 62), (row.nodes, row.rate), textcoords="offset points", xytext=(4, -12))
    axis.set(xlabel="nodes", ylabel="samples a second (predicted)", xscale="log", yscale="log")
    axis.set_xticks([row.nodes for row in good], [str(row.nodes) for row in good])
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=100)
    except OSError as error:
        raise UsageError(f"the plot could not be written: {error}") from None
    pyplot.close(figure)
