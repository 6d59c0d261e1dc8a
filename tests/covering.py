"""Covering arrays: every combination of two values in few cases."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest


def covering(*axes: Sequence[Any], strength: int = 2) -> list[Any]:
    """Parameters for the full product of the axes.

    Cases that are not needed to cover every combination of `strength` values are nightly.
    """
    kept = set(rows(axes, strength))
    cases = itertools.product(*(range(len(axis)) for axis in axes))
    return [_param([axis[i] for axis, i in zip(axes, case, strict=True)], case in kept) for case in cases]


def cases(*, indirect: Any = False, marks: Any = lambda value: (), **axes: Sequence[Any]) -> Any:
    """Parametrize a test with a covering array of the axes. `marks` returns the marks of a value."""
    chosen = [[values[i] for values, i in zip(axes.values(), row, strict=True)] for row in rows(axes.values())]
    params = [
        pytest.param(*row, marks=[m for value in row for m in marks(value)], id="-".join(map(_name, row)))
        for row in chosen
    ]
    return pytest.mark.parametrize(list(axes), params, indirect=indirect)


def rows(axes: Collection[Sequence[Any]], strength: int = 2) -> list[tuple[int, ...]]:
    """The cases that are needed, as indices into the axes; chosen greedily."""
    return needed(list(itertools.product(*(range(len(axis)) for axis in axes))), strength)


def needed(cases: Sequence[tuple[Any, ...]], strength: int = 2) -> list[tuple[Any, ...]]:
    """Those of the cases that together have every combination of `strength` values; chosen greedily."""
    covered = {case: set(itertools.combinations(enumerate(case), min(strength, len(case)))) for case in cases}
    chosen, left = [], set().union(*covered.values())
    while left:
        chosen.append(max(cases, key=lambda case: len(covered[case] & left)))
        left -= covered[chosen[-1]]
    return chosen


def every_value(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Those of the cases that together have every value, each about as often as the others of its axis."""
    chosen, used = [], Counter[tuple[int, Any]]()
    left = {value for case in cases for value in enumerate(case)}
    while left:
        new = {case: len(left & set(enumerate(case))) for case in cases}
        chosen.append(max(cases, key=lambda case: (new[case], -sum(used[value] for value in enumerate(case)))))
        used.update(enumerate(chosen[-1]))
        left -= set(enumerate(chosen[-1]))
    return chosen


def _param(values: list[Any], kept: bool) -> Any:
    name = "-".join(getattr(v, "__name__", None) or str(v) for v in values)
    return pytest.param(*values, id=name, marks=() if kept else pytest.mark.nightly)


def _name(value: Any) -> str:
    return str(getattr(value, "name", getattr(value, "__name__", value)))
