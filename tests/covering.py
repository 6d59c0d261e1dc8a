"""Covering arrays: far fewer cases than the full product, yet any two values of two axes occur together in one."""

from __future__ import annotations

import itertools

import pytest


def cases(*, indirect=False, marks=lambda value: (), **axes):
    """Parametrize a test with a covering array of the axes. `marks` returns the marks of a value."""
    rows = [[values[i] for values, i in zip(axes.values(), row, strict=True)] for row in covering(axes.values())]
    params = [
        pytest.param(*row, marks=[m for value in row for m in marks(value)], id="-".join(map(_name, row)))
        for row in rows
    ]
    return pytest.mark.parametrize(list(axes), params, indirect=indirect)


def covering(axes):
    """Rows of positions in the axes, chosen greedily."""
    rows = list(itertools.product(*(range(len(values)) for values in axes)))
    pairs = {row: set(itertools.combinations(enumerate(row), min(2, len(row)))) for row in rows}
    left, chosen = set().union(*pairs.values()), []
    while left:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & left)))
        left -= pairs[chosen[-1]]
    return chosen


def _name(value):
    return str(getattr(value, "name", getattr(value, "__name__", value)))
