"""The figures of benchmarks/auto: on rows that can be checked by hand, and those of the results page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is not installed

from benchmarks.auto import report

ROOT = Path(__file__).parents[2]


def row(predicted, measured, **changed):
    return {"title": "x", "predicted": predicted, "measured": measured, "predicted_peak": 100, "peak": 100,
            "error": ""} | changed  # fmt: skip


def test_errors_and_order():
    rows = [row(1.0, 1.0), row(2.0, 2.5), row(3.0, 2.0), row(9.0, 0.0, error="it ran out of memory")]
    assert report.time_errors(rows) == pytest.approx([0.0, 0.2, 0.5])
    assert report.tau(rows) == pytest.approx(1 / 3), "two pairs in order, one not; failed plans do not count"


def test_the_choice_is_the_best_of_the_plans_that_are_tried():
    rows = [row(1.0, 5.0), row(2.0, 4.0), row(3.0, 6.0), row(4.0, 2.0)]
    assert report.regret(rows) == pytest.approx(1.0), "the fourth was twice as fast"
    assert report.regret(rows[:3]) == 0.0


def test_every_goal_has_a_verdict():
    case = {"plans": [row(1.0, 1.05), row(2.0, 2.1, title="sharding(stage=2)", predicted_peak=120)]}
    lines = report.verdicts([case])
    assert [line[2] for line in lines[1:]] == ["met", "**not met**", "met", "met"]
    assert report.markdown(report.table(case)).count("\n") == 3


def test_the_page_shows_the_committed_measurements():
    page = (ROOT / "docs" / "results" / "auto.md").read_text()
    cases = json.loads((ROOT / "docs" / "results" / "auto.json").read_text())["plans"]
    for line in report.verdicts(cases)[1:]:
        assert " | ".join(line) in page
    for case in cases:
        assert report.markdown(report.table(case)) in page
