"""Tables and plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.recompute.measured import Row
from benchmarks.recompute.models import MODELS

Lines = list[list[str]]
MIB = 2**20


def trade(rows: Sequence[Row]) -> Lines:
    """Time relative to no recomputation in the same round; the share is of what exceeds the fixed bytes."""
    plain = next(row for row in rows if row["way"] == "plain")
    out = [["", "peak, MiB", "predicted", "of the activations", "allowed", "s", "added time", "predicted"]]
    for row in rows:
        share = (row["peak"] - row["fixed"]) / (plain["peak"] - plain["fixed"])
        predicted = f"{row['predicted'] / row['peak'] - 1:+.2%}" if row["predicted"] else ""
        limit = f"{row['limit'] / MIB:,.0f}" if row["limit"] else ""
        expected = f"{row['added'] / median(plain['seconds']):+.1%}" if row["added"] is not None else ""
        out.append([row["title"], f"{row['peak'] / MIB:,.1f}", predicted, f"{share:.0%}", limit,
                    f"{median(row['seconds']):.2f}", f"{added(row, plain):+.1%}", expected])  # fmt: skip
    return out


def added(row: Row, plain: Row) -> float:
    return median(a / b for a, b in zip(row["seconds"], plain["seconds"], strict=True)) - 1


def batches(rows: Sequence[Row]) -> Lines:
    """`time per sample`: relative to no recomputation in the same process."""
    out = [
        ["", "", "within", "largest batch", "factor", "samples per second", "time per sample", "peak, MiB", "predicted"]
    ]
    for row in rows:
        rate, before = row["batch"] / median(row["seconds"]), row["beside"] / median(row["without"])
        figures = [row["memory"], str(row["batch"]), f"{row['batch'] / row['beside']:.1f}"]
        figures += [f"{rate:.3g}", f"{before / rate:.2f}"]
        predicted = f"{row['predicted'] / row['peak'] - 1:+.2%}" if row["predicted"] else ""
        figures += [f"{row['peak'] / MIB:,.0f}", predicted]
        out.append([MODELS[row["model"]].title, row["setting"], *figures])
    return out


def compiled(rows: Sequence[Row]) -> Lines:
    out = [["", "peak, MiB", "s", "added to its own baseline"]]
    for row in rows:
        more = median(row["seconds"]) / median(row["without"]) - 1
        out.append([row["title"], f"{row['peak'] / MIB:,.1f}", f"{median(row['seconds']):.3f}", f"{more:+.1%}"])
    return out


def tables(results: dict[str, Any]) -> Iterator[tuple[str, Lines]]:
    for name in dict.fromkeys(row["model"] for row in results.get("trade", [])):
        mine = [row for row in results["trade"] if row["model"] == name]
        yield f"{MODELS[name].title}, batch {mine[0]['batch']}", trade(mine)
    if results.get("batches"):
        yield "The largest batch", batches(results["batches"])
    if results.get("compiled"):
        from benchmarks.recompute.compiled import TITLE

        yield TITLE, compiled(results["compiled"])


def as_markdown(lines: Lines) -> str:
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---", *["---:"] * (len(head) - 1)], *rest]) + "\n"


def plot(folder: Path, results: dict[str, Any]) -> None:
    """Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [*dict.fromkeys(row["model"] for row in results["trade"])]
    figure, axes = pyplot.subplots(1, len(names), figsize=(6 * len(names), 5), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        rows = [row for row in results["trade"] if row["model"] == name]
        plain = rows[0]
        ours = sorted((row for row in rows if row["added"] is not None), key=lambda row: row["peak"])
        x = [row["peak"] / MIB for row in ours]
        axis.plot(x, [100 * added(row, plain) for row in ours], "o-", label="memory_budget, measured")
        seconds = median(plain["seconds"])
        predicted = [row["predicted"] / MIB for row in ours]
        axis.plot(predicted, [100 * row["added"] / seconds for row in ours], "x--", label="memory_budget, predicted")
        for row in rows:
            if row["added"] is None:
                axis.plot(row["peak"] / MIB, 100 * added(row, plain), "s", label=row["title"])
        axis.axvline(plain["fixed"] / MIB, color="grey", linewidth=0.8, linestyle=":", label="parameters and optimizer")
        axis.set(xlabel="peak of a step, MiB", ylabel="added time of forward and backward, %", title=MODELS[name].title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "recompute.png", dpi=100)
    pyplot.close(figure)
