"""Errors of the predictions, their ranking, and the choices that follow from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import Any

from benchmarks.auto.models import MODELS

CLEAR = 0.1  # two updates of one plan may differ by nearly this much on two cores
TRIALS = 3
Row = dict[str, Any]
Lines = list[list[str]]


def good(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not row["error"]]


def time_errors(rows: Sequence[Row]) -> list[float]:
    return [abs(row["predicted"] / row["measured"] - 1) for row in good(rows)]


def peak_errors(rows: Sequence[Row]) -> list[float]:
    return [row["predicted_peak"] / row["peak"] - 1 for row in good(rows) if row["peak"]]


def tau(rows: Sequence[Row], *, differ: float = 0.0) -> float:
    """Kendall's tau between the predicted and the measured ranking, over pairs whose measured times differ by more."""
    pairs = [(a, b) for a, b in itertools.combinations(good(rows), 2)
             if abs(a["measured"] / b["measured"] - 1) > differ]  # fmt: skip
    if not pairs:
        return 1.0
    agree = sum((a["predicted"] - b["predicted"]) * (a["measured"] - b["measured"]) > 0 for a, b in pairs)
    return (2 * agree - len(pairs)) / len(pairs)


def regret(rows: Sequence[Row]) -> float:
    """How much slower the choice of auto, the best of the plans it tries, is than the best plan that was run."""
    measured = [row["measured"] for row in sorted(good(rows), key=lambda row: row["predicted"])]
    return min(measured[:TRIALS]) / min(measured) - 1


def goals(results: Row) -> Lines:
    """Of every part that was run."""
    out = [["goal", "reached", "verdict"], *(verdicts(results["plans"]) if results["plans"] else [])]
    if search := results.get("search"):
        seconds = search["seconds"]
        out.append(["the whole search under 60 s for BERT-base", f"{seconds:.0f} s", _met(seconds < 60)])
    if rows := results.get("whatif"):
        errors = [row["predicted"] / row["measured"] - 1 for row in rows]
        out.append(["what-if for 2 and 4 hosts from a profile on one, within 15 %",
                    ", ".join(f"{e:+.0%}" for e in errors), _met(max(map(abs, errors)) <= 0.15)])  # fmt: skip
    return out


def verdicts(clusters: Sequence[Row]) -> Lines:
    rows = [row for cluster in clusters for row in cluster["plans"]]
    errors, peaks = time_errors(rows), peak_errors(rows)
    undivided = [row for row in rows if not any(word in row["title"] for word in ("pipeline", "sharding"))]
    own = [abs(e) for e in peak_errors(undivided)]
    choices = [regret(cluster["plans"]) for cluster in clusters]
    near = sum(choice <= 0.05 for choice in choices)
    taus = [tau(cluster["plans"]) for cluster in clusters]
    clear = mean(tau(cluster["plans"], differ=CLEAR) for cluster in clusters)
    return [
        ["mean error of time at most 10 %", f"{mean(errors):.1%} of {len(errors)} plans, median {median(errors):.1%}, "
         f"worst {max(errors):.0%}", _met(mean(errors) <= 0.1)],
        ["mean error of peak bytes at most 2 %", f"{mean(map(abs, peaks)):.1%} of all; {mean(own):.2%} of the "
         f"{len(own)} whose ranks hold whole models", _met(mean(map(abs, peaks)) <= 0.02)],
        ["Kendall's tau of the order at least 0.9", f"mean {mean(taus):.2f}, from {min(taus):.2f} to {max(taus):.2f}; "
         f"{clear:.2f} of pairs that differ by more than {CLEAR:.0%}",
         _met(mean(taus) >= 0.9)],
        ["the choice within 5 % of the best in 95 % of the cases", f"in {near} of {len(choices)}; the worst is "
         f"{max(choices):.0%} slower", _met(near >= 0.95 * len(choices))],
    ]  # fmt: skip


def _met(yes: bool) -> str:
    return "met" if yes else "**not met**"


def cases(clusters: Sequence[Row]) -> Lines:
    """A line per case."""
    out = [["", "tau", "the choice is slower than the best by", "profiled and predicted, s"]]
    for c in clusters:
        out.append([title(c), f"{tau(c['plans']):.2f}", f"{regret(c['plans']):.1%}", f"{c['profile_seconds']:.0f}"])
    return out


def title(cluster: Row) -> str:
    return f"{MODELS[cluster['model']].title}, {cluster['network']}"


def table(cluster: Row) -> Lines:
    out = [["plan", "predicted, s", "measured, s", "error", "predicted peak, MiB", "measured, MiB", "error"]]
    for row in sorted(cluster["plans"], key=lambda row: row["predicted"]):
        if row["error"]:
            out.append([row["title"], f"{row['predicted']:.3g}", row["error"], "", "", "", ""])
            continue
        peak = [f"{row['predicted_peak'] / 2**20:,.0f}", f"{row['peak'] / 2**20:,.0f}",
                f"{row['predicted_peak'] / row['peak'] - 1:+.1%}"] if row["peak"] else ["", "", ""]  # fmt: skip
        error = row["predicted"] / row["measured"] - 1
        out.append([row["title"], f"{row['predicted']:.3g}", f"{row['measured']:.3g}", f"{error:+.0%}", *peak])
    return out


def what_if(rows: Sequence[Row]) -> Lines:
    out = [["", "hosts", "predicted, s", "measured, s", "error"]]
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        out.append([MODELS[row["model"]].title, str(row["hosts"]), f"{row['predicted']:.3g}", f"{row['measured']:.3g}",
                    f"{error:+.0%}"])  # fmt: skip
    return out


def tables(results: Row) -> Iterator[tuple[str, Lines]]:
    yield "goals", goals(results)
    if results.get("whatif"):
        yield "what if", what_if(results["whatif"])
    if results["plans"]:
        yield "cases", cases(results["plans"])
    for cluster in results["plans"]:
        yield title(cluster), table(cluster)


def as_markdown(lines: Lines) -> str:
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---", *["---:"] * (len(head) - 1)], *rest]) + "\n"
