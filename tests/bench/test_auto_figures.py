"""The figures of benchmarks/auto, on rows that can be checked by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is not installed

from benchmarks.auto import report


def row(predicted, measured, **changed):
    return {"title": "x", "predicted": predicted, "measured": measured, "predicted_peak": 100, "peak": 100,
            "error": ""} | changed  # fmt: skip


def test_errors_and_order():
    rows = [row(1.0, 1.0), row(2.0, 2.5), row(3.0, 2.0), row(9.0, 0.0, error="it ran out of memory")]
    assert report.time_errors(rows) == pytest.approx([0.0, 0.2, 0.5])
    assert report.tau(rows) == pytest.approx(1 / 3), "two pairs in order, one not; what failed does not count"


def test_the_pick_is_the_best_of_the_first_that_are_tried():
    rows = [row(1.0, 5.0), row(2.0, 4.0), row(3.0, 6.0), row(4.0, 2.0)]
    assert report.regret(rows) == pytest.approx(1.0), "what would have been fourth was twice as fast"
    assert report.regret(rows[:3]) == 0.0


def test_every_goal_has_a_verdict():
    scene = {"plans": [row(1.0, 1.05), row(2.0, 2.1, title="sharding(stage=2)", predicted_peak=120)]}
    lines = report.verdicts([scene])
    assert [line[2] for line in lines[1:]] == ["met", "**not met**", "met", "met"]
    assert report.markdown(report.table(scene)).count("\n") == 3
