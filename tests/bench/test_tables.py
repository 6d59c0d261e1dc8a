"""The tables of docs/results that benchmarks write, from results that are made up here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is not installed

from benchmarks import pipeline
from benchmarks.frame.pages import BEGIN, END, RESULTS
from benchmarks.studies import __main__ as studies

RATIOS = dict.fromkeys((*pipeline.SHOWN, "split"), 0.625) | {"limit": 0.5, "zero_bubble_v": 0.5, "split": 1.0}


def results(folder, **changed):
    """The JSON of every benchmark of pipelines: a ratio, and an interval of a fifth to both sides."""
    goals = {name: getattr(pipeline, name).benchmark.goal for name in RATIOS}
    for name, ratio in RATIOS.items():
        one = {
            "ratio": ratio, "statistics": {"low": 0.8 * ratio, "high": 1.25 * ratio}, "goal": goals[name],
            "verdict": "too noisy" if goals[name] else "reported",
        } | changed.get(name, {})  # fmt: skip
        (folder / f"pipeline.{name}.json").write_text(json.dumps(one))
    return list(pipeline.tables(folder))


def first_cells(lines):
    return [line.split(" | ")[0] for line in lines if line.startswith("|")]


def test_speed_ups_are_shares_of_what_formula_and_machine_allow(tmp_path):
    lines = results(tmp_path)
    assert "| 1F1B | 0.625 | 0.500 - 0.781 | 1.60 | 1.00 of 1.6 | 1.00 |" in lines
    assert "| Interleaved1F1B | 0.625 | 0.500 - 0.781 | 1.60 | 0.90 of 1.78 | 0.90 |" in lines
    assert "| ZBVZeroBubble | 0.500 | 0.400 - 0.625 | 2.00 | 1.00 of 2 | 1.00 |" in lines
    assert "| `limit`, no communication | 0.500 | 0.400 - 0.625 | 2.00 | 1.00 of 2 | 1 |" in lines
    slower = results(tmp_path, limit={"ratio": 0.625})
    assert "| DualPipeV | 0.625 | 0.500 - 0.781 | 1.60 | 0.80 of 2 | 1.00 |" in slower, "a machine that allows but 1.6"


def test_a_goal_of_pipelines_is_met_missed_or_not_shown(tmp_path):
    noisy = results(tmp_path)
    assert noisy[-4].endswith("| 1.00; interval 0.80 to 1.25 | **not shown**: too noisy |")
    assert noisy[-2].endswith("| all of them | met |")
    assert noisy[-1].endswith("| see below | **not shown**: too noisy (1.000, 0.800 - 1.250) |")
    lost = {"ratio": None, "statistics": None, "verdict": "cannot run"}
    others = {"one_f_one_b": {"ratio": 0.7}, "zero_bubble_v": {"verdict": "not met"}, "looped": lost, "split": lost}
    lines = results(tmp_path, **others)
    assert lines[-4].endswith("| **not shown**: too noisy, and the median misses it |")
    assert lines[-3].endswith("| 1.00 p | **not met** |")
    assert lines[-2].endswith("| 6 of 7 | **not met** |")
    assert lines[-1].endswith("| see below | cannot run |")
    assert "| LoopedBFS | cannot run |  |  |  |  |" in lines


def test_the_page_of_pipelines_has_the_rows_that_are_written(tmp_path):
    page = (RESULTS / "pipeline.md").read_text()
    shown = page[page.index(BEGIN) : page.index(END)].splitlines()
    assert first_cells(shown) == first_cells(results(tmp_path))


# --- studies ---------------------------------------------------------------------------------------
def test_every_study_is_reported_and_one_that_fails_stops_no_other(monkeypatch, capsys):
    begun = []

    def start(study, words, variables=None):
        begun.append((study, *words))
        if study == "auto":
            raise studies.StudyError("it ended with 1")

    monkeypatch.setattr(studies, "start", start)
    with pytest.raises(SystemExit) as end:
        studies.main([], standalone_mode=False)
    assert end.value.code == 1
    assert begun == [(study, "--report", "--out", str(RESULTS)) for study in studies.RUNS]
    assert capsys.readouterr().err == "auto.md stays as it is: it ended with 1\n"


def test_results_are_taken_over_when_all_parts_of_a_study_have_run(monkeypatch, tmp_path):
    results, out = tmp_path / "results", tmp_path / "out"
    for folder in (results, out / "auto", out / "recompute"):
        folder.mkdir(parents=True)
    for study in ("auto", "recompute"):
        (out / study / f"{study}.json").write_text("new")
    monkeypatch.setattr(studies, "RESULTS", results)
    monkeypatch.setattr(studies, "OUT", out)
    monkeypatch.setattr(studies, "environment", lambda study: {})

    def start(study, words, variables):
        if "compiled" in words:
            raise studies.StudyError("it ended with 1")

    monkeypatch.setattr(studies, "start", start)
    studies.run("auto")
    with pytest.raises(studies.StudyError):
        studies.run("recompute")
    studies.run("large_batch")
    assert [p.name for p in results.iterdir()] == ["auto.json"]


def test_a_command_that_fails_is_named():
    with pytest.raises(studies.StudyError, match=r"`python -m benchmarks\.nothing --report` ended with 1"):
        studies.start("nothing", ["--report"])
