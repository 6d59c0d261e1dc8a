"""The study of two islands, with tiny sizes and made-up outcomes. Its results are in docs/results and not tested."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is not installed

from benchmarks.netlab import allowed
from benchmarks.slow_network import __main__ as command
from benchmarks.slow_network import study
from benchmarks.slow_network.islands import report
from benchmarks.slow_network.islands.command import PATIENT, PLAN
from benchmarks.slow_network.islands.runs import Kept, Outcome, Plan, Run, Timing, chosen, left, remaining
from benchmarks.slow_network.islands.summary import summarised
from benchmarks.slow_network.islands.tasks import TASKS, order
from benchmarks.slow_network.islands.times import stretch
from benchmarks.slow_network.islands.ways import CANDIDATES, WAYS

STEPS = {"images": 65, "text": 65}
TINY = Plan(["ddp", "alone", "island_dgc"], STEPS, seeds=3)
SENT = {"ddp": 8e6, "alone": 1e3, "island_dgc": 1e4}
SCORE = {"ddp": 0.90, "alone": 0.80, "island_dgc": 0.8995}


def outcome(run: Run) -> Outcome:
    """Seeds differ by a thousandth; a learning rate of 1 is the best."""
    score = SCORE[run.way] + 0.001 * run.seed - 0.01 * (dict(run.settings)["rate"] != 1)
    curve = [(1, score - 0.4, 2.0), (33, score - 0.1, 1.0), (65, score, 0.5)]
    return Outcome(score - 0.001, score, 0.5, curve, SENT[run.way], 10**6, 1.0)


def played(path: Path) -> Kept:
    kept = Kept(path)
    while (run := next(remaining(TINY, kept.outcomes), None)) is not None:
        before = left(TINY, kept.outcomes)
        kept.add(run, outcome(run))
        assert left(TINY, kept.outcomes) == before - 1
    for block in range(3):
        for way, seconds in {"ddp": 0.5, "alone": 0.01 + 0.001 * block, "island_dgc": 0.0105 + 0.001 * block}.items():
            kept.time(Timing("images", way, "100mbit", block, 64, seconds, 1e3))
    return kept


def test_all_methods_try_equally_many_settings_and_end_just_after_an_average():
    assert {len(way.candidates) for way in WAYS} == {CANDIDATES}
    assert len({way.name for way in WAYS}) == len(WAYS)
    for way in WAYS:
        for task in TASKS.values():
            assert (task.steps - 1) % way.period == 0, (way.name, task.name)
            assert (task.steps - 1) % task.every == 0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_whole_periods_are_timed(way):
    for task in TASKS.values():
        lead, timed = stretch(way, task.steps)
        assert way.whole or timed % way.period == 0
        assert lead > (way.period if way.background else 0)
        assert lead + timed <= task.steps


def test_every_sample_comes_once_per_epoch_and_in_another_order_with_another_seed():
    found = order(64, steps=4, workers=4, batch=8, seed=0)
    assert found.shape == (4, 4, 8)
    for epoch in found.flatten().view(2, 64):
        assert sorted(epoch.tolist()) == [*range(64)]
    assert not found.equal(order(64, steps=4, workers=4, batch=8, seed=1))


def test_the_best_setting_on_held_out_samples_gets_all_seeds(tmp_path):
    kept = played(tmp_path / "runs.jsonl")
    for task in STEPS:
        for way in TINY.ways:
            best = chosen(TINY, task, way, kept.outcomes)
            assert best is not None
            assert dict(best.settings)["rate"] == 1
            runs = [run for run in kept.outcomes if (run.task, run.way) == (task, way)]
            assert len(runs) == CANDIDATES + TINY.seeds - 1
    assert left(TINY, kept.outcomes) == 0


def test_a_longer_task_takes_over_the_settings_of_a_shorter_one(tmp_path):
    plan = Plan(TINY.ways, STEPS | {"long": 129}, seeds=3, settings_of={"long": "text"}, only={"long": ["ddp"]})
    kept = played(tmp_path / "runs.jsonl")
    best = chosen(TINY, "text", "ddp", kept.outcomes)
    wanted = [Run("long", "ddp", best.settings, seed, 129) for seed in range(3)]
    assert [*remaining(plan, kept.outcomes)] == wanted
    assert left(plan, kept.outcomes) == 3
    assert chosen(plan, "long", "alone", kept.outcomes) is None
    for run in wanted:
        kept.add(run, outcome(run))
    assert [cell.way.name for cell in summarised(plan, kept, "long").cells] == ["ddp"]
    titles = {title for title, _ in report.tables(plan, kept)}
    assert titles >= {"goals", "language model: settings", f"{TASKS['long'].title}: scores and bytes"}
    assert f"{TASKS['long'].title}: settings" not in titles


def test_a_study_that_was_interrupted_while_writing_resumes(tmp_path):
    path = tmp_path / "runs.jsonl"
    kept = played(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:5]) + "\n" + lines[5][:40])
    again = Kept(path)
    assert [*again.outcomes.items()] != [*kept.outcomes.items()]
    assert len(again.outcomes) == 5
    run = next(remaining(TINY, again.outcomes))
    again.add(run, outcome(run))
    assert len(Kept(path).outcomes) == 6
    assert Kept(path).outcomes[run].test == outcome(run).test


def test_what_was_reached(tmp_path):
    found = summarised(TINY, played(tmp_path / "runs.jsonl"), "images")
    ours, dense = found.at("island_dgc"), found.at("ddp")
    assert ours is not None
    assert dense is not None
    assert found.fewer(ours) == pytest.approx(800)
    assert found.keeps(ours)  # its mean is above the worst seed of dense
    assert not found.keeps(found.at("alone"))
    assert found.slower(ours, "100mbit") == pytest.approx(0.0115 / 0.011)
    assert found.met(ours) == [True, True, True]
    assert found.met(dense) == [True, False, False]
    target = min(dense.tests)
    at33, at65 = ours.test - 0.1, ours.test
    assert found.steps_to_target(ours) == pytest.approx(33 + 32 * (target - at33) / (at65 - at33))
    assert found.steps_to_target(found.at("alone")) is None


def test_the_report(tmp_path):
    kept = played(tmp_path / "runs.jsonl")
    found = dict(report.tables(TINY, kept))
    goals = {(line[0], line[1]): line[2:] for line in found["goals"][1:]}
    ours = "`islands, k=32, dgc 0.9`"
    assert goals[ours, "Fashion-MNIST"] == ["90.05%", "800 x", "1.05"]
    assert goals[ours, "language model"][2] == "not timed"
    report.show(TINY, kept.path, tmp_path / "out")
    assert "## Fashion-MNIST: times" in (tmp_path / "out" / "tables.md").read_text()
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "out" / "islands.png").read_bytes()[:4] == b"\x89PNG"


def test_the_committed_runs_are_those_of_the_study():
    done = CliRunner().invoke(command.main, ["--only", "islands", "--report", "--help"])
    assert "islands_times" in done.output
    kept = Kept(command.command.KEPT)
    for run in kept.outcomes:
        assert run in PLAN.search(run.task, run.way) or run.seed or run.task in PLAN.settings_of, run


def test_training_and_timing_on_text(tmp_path):
    if reason := allowed():
        pytest.skip(f"no lab can be made here: {reason}")
    runs = tmp_path / "runs.jsonl"
    plan = {"ways": ["ddp", "island_dgc"], "steps": {"text": 17}, "seeds": 1}
    asked = {"plan": plan, "data": "", "runs": str(runs), "minutes": 10, "blocks": 1, "rates": ["1gbit"]}
    how = {"workers": 2, "quiet": True, "env": PATIENT}
    study.run("islands.worker", asked | {"times": False}, **how)
    kept = Kept(runs)
    assert len(kept.outcomes) == 2 * CANDIDATES
    for run, found in kept.outcomes.items():
        share = found.sent / (17 * 1.5 * found.bytes)
        assert share == pytest.approx(1, rel=0.1) if run.way == "ddp" else share < 0.03
        assert [step for step, _, _ in found.curve] == [1, 17]
        assert found.loss == pytest.approx(-found.test)
    before = runs.read_text()
    study.run("islands.worker", asked | {"times": False}, **how)
    assert runs.read_text() == before  # nothing is repeated
    study.run("islands.worker", asked | {"times": True}, **how)
    assert {timing.way for timing in Kept(runs).timings.values()} == {"ddp", "island_dgc"}
