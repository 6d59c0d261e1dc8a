"""The explanation of a search: which plans were considered, predicted and measured, and why the winner won."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fleetx.base.sizes import format_bytes
from fleetx.planner.candidates import Candidate
from fleetx.planner.cost import StepCost
from fleetx.planner.model_profile import ModelProfile
from fleetx.planner.search import Search
from fleetx.strategy.cost_model import Cluster
from fleetx.strategy.explain import render

ROWS = 12
WIDTH = 150


def explanation(search: Search, best: Candidate, seconds: float) -> str:
    tried = sum(candidate.trial is not None for candidate in search.candidates)
    lines = [
        f"auto: {best.title}",
        f"batch: {best.equation}",
        _predicted(best.cost),
        _measured(search.cluster, search.profile),
        f"{search.predicted} plans predicted, {tried} tried, in {seconds:.0f} s",
        table(search.candidates),
    ]
    return "\n".join(lines)


def table(candidates: Sequence[Candidate]) -> str:
    out = Table(
        "plan", "feed", "predicted, s", "measured, s", "predicted peak", "measured peak", "why not",
        box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for candidate in candidates[:ROWS]:
        cost, trial = candidate.cost, candidate.trial
        measured = trial if trial is not None and not trial.error else None
        cells = [
            candidate.title, str(candidate.feed), f"{'' if candidate.exact else '~'}{cost.seconds:.3g}",
            f"{measured.seconds:.3g}" if measured else "", format_bytes(cost.peak),
            format_bytes(measured.peak) if measured and measured.peak else "", candidate.rejection or "chosen",
        ]  # fmt: skip
        out.add_row(*map(Text, cells))  # not as strings: brackets in an error message would be parsed as markup
    more = f"\n... and {len(candidates) - ROWS} more" if len(candidates) > ROWS else ""
    return render(out, WIDTH) + more


def _predicted(cost: StepCost) -> str:
    spent = {"forward and backward": cost.compute, "recomputation": cost.recompute, "pipeline bubble": cost.bubble,
             "network not hidden": cost.network, "update": cost.update, "strategies": cost.overhead}  # fmt: skip
    return "predicted: " + ", ".join(f"{name} {s:.3g} s" for name, s in spent.items() if s >= 0.001 * cost.seconds)


def _measured(cluster: Cluster, profile: ModelProfile) -> str:
    """What the predictions are based on."""
    hosts = f"{cluster.hosts} hosts with {cluster.ranks_per_host} each" if cluster.hosts > 1 else "one host"
    link, n = cluster.all_reduce, profile.samples
    ranks = f"{cluster.ranks} rank{'s' if cluster.ranks > 1 else ''} on {hosts}"
    latency = f"all-reduce {link.speed / 1e6:,.0f} MB/s with a latency of {1e3 * link.latency:.2f} ms; "
    return (
        f"measured here: {ranks}, {cluster.device}, {format_bytes(cluster.memory)} per rank; "
        f"{latency if cluster.ranks > 1 else ''}{n} samples take {profile.declared.forward.at(n):.3g} s forward and "
        f"{profile.declared.backward.at(n):.3g} s backward, an update {profile.update:.3g} s; "
        f"parameters {format_bytes(profile.parameters)}"
    )
