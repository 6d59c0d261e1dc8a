"""Covering arrays: every combination of two values in few cases."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*axes: Sequence[Any], strength: int = 2) -> list[Any]:
    """Parameters for the full product of the axes.

    Cases that are not needed to cover every combination of `strength` values are nightly.
    """
    cases = list(itertools.product(*(range(len(axis)) for axis in axes)))
    covered = {case: set(itertools.combinations(enumerate(case), strength)) for case in cases}
    needed, left = set(), set().union(*covered.values())
    while left:
        best = max(cases, key=lambda case: len(covered[case] & left))
        needed.add(best)
        left -= covered[best]
    return [_param([axis[i] for axis, i in zip(axes, case, strict=True)], case in needed) for case in cases]


def _param(values: list[Any], needed: bool) -> Any:
    name = "-".join(getattr(v, "__name__", None) or str(v) for v in values)
    return pytest.param(*values, id=name, marks=() if needed else pytest.mark.nightly)
