"""fleet.progress: every batch passes, and rank 0 says how far it is."""

from __future__ import annotations

import re

import pytest

from fleetx import fleet
from fleetx.errors import UsageError
from training import batches, net, sgd, zero_last


def loop(**options):
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    seen = []
    for x, y in fleet.progress(batches(5), **options):
        zero_last(model, optimizer, x, y)
        seen.append(len(x))
    return seen


def test_without_a_terminal_it_prints_lines(capsys):
    assert loop(every=1e-9) == [4] * 5
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert lines[-1].startswith("fleetx: batches 5 of 5, update 5, loss ")
    assert "learning rate 0.1" in lines[-1]
    assert "samples/s" in lines[-1]
    assert "left 0:00:00" in lines[-1]
    assert f"loss {fleet.metrics()['loss']:.4g}" in lines[-1]


def test_on_a_terminal_it_is_a_table(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    assert loop() == [4] * 5
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    for word in ("batches", "5 of 5", "update", "loss", "learning rate", "samples/s", "left"):
        assert word in shown


def test_a_loader_of_unknown_length_has_no_time_left(capsys):
    fleet.init()
    assert list(fleet.progress((i for i in range(3)), every=60)) == [0, 1, 2]
    line = capsys.readouterr().err
    assert "batches 3," in line
    assert "left" not in line
    assert list(fleet.progress((i for i in range(3)), total=3, every=60)) == [0, 1, 2]
    assert "batches 3 of 3" in capsys.readouterr().err


def test_it_knows_how_many_steps_a_resumed_run_has_left(tmp_path, capsys):
    for done, left in ((0, 2), (2, 3)):
        fleet.init()
        model = net()
        model, optimizer = fleet.distribute(model, sgd(model))
        steps = fleet.checkpoints(tmp_path, every=2, steps=done + left)
        for _ in fleet.progress(steps, every=60):
            zero_last(model, optimizer, *batches(1)[0])
        assert f"batches {left} of {left}" in capsys.readouterr().err
        fleet.release()


def test_a_loop_that_is_left_early_ends_cleanly(capsys):
    fleet.init()
    for number in fleet.progress(range(10), every=60):
        if number == 3:
            break
    assert "batches 3 of 10" in capsys.readouterr().err


def quiet(folder):
    fleet.init()
    return list(fleet.progress(range(3)))


def test_the_other_ranks_say_nothing(ranks, tmp_path):
    assert ranks.run(quiet, str(tmp_path)) == [[0, 1, 2]] * 2


@pytest.mark.parametrize("wrong", [{"total": -1}, {"total": 1.5}, {"every": 0}, {"every": "soon"}])
def test_wrong_options_are_errors(wrong):
    fleet.init()
    with pytest.raises(UsageError, match="must be a number of"):
        fleet.progress([1], **wrong)
