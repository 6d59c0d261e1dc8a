"""A short version of benchmarks.chaos: nothing is lost, differs, hangs or is left behind."""

from __future__ import annotations

import json
import logging
import threading

import pytest
from benchmarks.chaos import goodput, report, training
from benchmarks.chaos.__main__ import main
from benchmarks.chaos.training import Line
from click.testing import CliRunner

import fleetx.launch
from forked_command import ForkedCommand


@pytest.fixture
def _log_again():
    """The command turns warnings off for its process, which here goes on to other tests."""
    yield
    logging.disable(logging.NOTSET)


def forked(words, *, prefix, cwd, env):
    assert not prefix
    command = ForkedCommand(fleetx.launch.main, words, cwd=cwd, env=env)
    threading.Thread(target=_read_all, args=(command.stdout,), daemon=True).start()
    return command


def _read_all(file):
    with file:
        file.read()


@pytest.mark.slow
@pytest.mark.usefixtures("_log_again")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [9, pytest.param(14, marks=pytest.mark.nightly)])
def test_a_training_survives_kills_and_damage_bit_for_bit(tmp_path, kills, monkeypatch):
    if kills == 9:  # one in every phase; nightly, fleetrun starts as a user starts it
        monkeypatch.setattr(training, "fleetrun", forked)
    options = f"--only kills,damage --kills {kills} --flips 200 --damages 40 --steps 60 --jobs 1"
    done = CliRunner().invoke(main, [*options.split(), "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "chaos.json").read_text())
    assert {name: found for name, found in report.summary(results).items() if found} == {}, done.output
    assert sum(len(run["kills"]) for run in results["kills"]) == kills
    assert sum(sum(row.values()) for row in results["flips"].values()) == 200
    assert results["fallbacks"] == {"older": 4}
    assert sum(run["resumed"] for run in results["kills"]) > 1
    assert "| bit flips | 10000 | 200 |" in (tmp_path / "chaos.md").read_text()


def test_goodput_counts_what_a_restart_costs_and_the_steps_that_are_done_again():
    times = [("resumed", 0, 0.0), ("step", 1, 1.0), ("step", 2, 2.0), ("step", 3, 3.0), ("step", 4, 4.0),
             ("resumed", 2, 6.0), ("step", 3, 7.0), ("step", 4, 8.0), ("step", 5, 9.0), ("step", 6, 11.0)]  # fmt: skip
    found = goodput.account([Line(what, step, "", "", at) for what, step, at in times])
    assert found["lost"] == [4.0]  # from step 2 at 2.0 to step 3 at 7.0, less one step
    assert found["goodput"] == pytest.approx(0.6)
