"""The figures of benchmarks/auto, on rows that can be checked by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is not installed

from benchmarks.auto import __main__ as command
from benchmarks.auto import report


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
    assert [line[2] for line in lines] == ["met", "**not met**", "met", "met"]
    assert report.as_markdown(report.table(case)).count("\n") == 4


def test_goals_of_parts_that_were_not_run_are_left_out():
    parts = {"search": {"seconds": 61.0}, "whatif": [{"model": "mlp", "hosts": 2, "predicted": 0.9, "measured": 1.0}]}
    lines = report.goals({"plans": []} | parts)
    assert [line[1:] for line in lines[1:]] == [["61 s", "**not met**"], ["-10%", "met"]]
    assert [title for title, _ in report.tables({"plans": []} | parts)] == ["goals", "what if"]
    assert [title for title, _ in report.tables({"plans": []})] == ["goals"]


@pytest.fixture
def folder(tmp_path):
    """Results of another machine, and a page that shows them."""
    case = {"model": "mlp", "network": "loopback", "profile_seconds": 4.0, "plans": [row(1.0, 1.05)]}
    results = {"plans": [case], "machine": {"cpu": "another"}, "date": "2001-02-03"}
    (tmp_path / "auto.json").write_text(json.dumps(results))
    (tmp_path / "auto.md").write_text("before\n\n<!-- table: cases -->\n| old |\n\nafter\n")
    return tmp_path


def test_a_report_fills_the_page_and_leaves_machine_and_date_alone(folder):
    old = (folder / "auto.json").read_text()
    out = CliRunner().invoke(command.main, ["--report", "--out", str(folder)])
    assert out.exit_code == 0, out.output
    assert (folder / "auto.json").read_text() == old
    before, table, after = (folder / "auto.md").read_text().split("\n\n")
    assert (before, after) == ("before", "after\n")
    assert table.splitlines()[-1] == "| MLP, 4 layers of 2048, loopback | 1.00 | 0.0% | 4 |"


def test_a_page_that_shows_more_than_was_measured_stays_as_it_is(folder):
    (folder / "auto.md").write_text("<!-- table: what if -->\n| old |\n")
    out = CliRunner().invoke(command.main, ["--report", "--out", str(folder)])
    assert out.exit_code == 1
    assert "auto.md stays as it is: the page shows the table 'what if'" in " ".join(out.output.split())
    assert "| old |" in (folder / "auto.md").read_text()
