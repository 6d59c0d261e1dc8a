"""The plots of `fleetx plan --plot` and `fleetx batch --plot`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleetx.errors import UsageError


def check_plot() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")


def axes(number: int, size: tuple[float, float]) -> list[Any]:
    """Axes side by side, in an off-screen figure."""
    check_plot()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return list(pyplot.subplots(1, number, figsize=size, squeeze=False)[1][0])


def finish(axis: Any, x: Sequence[float], words: Sequence[str] = (), **labels: str) -> None:
    """Make both axes logarithmic, with a tick at each x."""
    axis.set(xscale="log", yscale="log", **labels)
    axis.set_xticks(x, words or [str(value) for value in x])
    axis.set_xticks([], minor=True)
    low, high = axis.get_ylim()
    axis.yaxis.set_major_formatter("{x:,.6g}")  # not powers of ten
    axis.yaxis.set_minor_formatter("{x:,.6g}" if high < 30 * low else "")  # no overlapping labels
    axis.grid(alpha=0.3)
    axis.legend()


def save(axis: Any, path: Path) -> None:
    """Write the figure of these axes."""
    from matplotlib import pyplot

    figure = axis.figure
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=100)
    except OSError as error:
        raise UsageError(f"--plot: {path} cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
