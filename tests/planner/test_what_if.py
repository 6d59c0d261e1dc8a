"""Predictions for machines that are not here."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner
from test_cost import MB, SCENE, WORK

from fleetx.cli import main
from fleetx.planner import whatif


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("25GB/s", 25e9), ("100Mbit/s", 12.5e6), ("1 Gbit/s", 125e6), ("10Gbps", 1.25e9), ("8b/s", 1.0)],
)
def test_speeds_are_read_as_people_write_them(text, bytes_):
    assert whatif.speed(text) == pytest.approx(bytes_)


@pytest.mark.parametrize("text", ["fast", "25", "0GB/s", "25GiB", "-1GB/s"])
def test_what_is_no_speed_is_refused(text):
    with pytest.raises(ValueError, match="is not a speed such as"):
        whatif.speed(text)


def machine(**changed):
    made = {"nodes": 8, "per_node": 2, "link": 100.0 * MB, "inner": 1e12, "memory": 1 << 40} | changed
    return whatif.Machine(**made)


def rows(**changed):
    return whatif.rows(machine(**changed), SCENE, WORK, {}, allow="exact")


def test_a_slow_link_limits_and_a_fast_one_does_not():
    slow, fast = rows(link=10.0 * MB), rows(link=1e13)
    assert [row.nodes for row in slow] == [1, 2, 4, 8]
    assert slow[-1].account.limit(1 << 40) == "link"
    assert fast[-1].account.limit(1 << 40) == "compute"
    assert fast[-1].rate > slow[-1].rate
    assert fast[-1].rate == pytest.approx(8 * fast[0].rate, rel=0.1)


def test_faster_devices_are_faster_by_the_stated_factor():
    before, after = rows(link=1e15), rows(link=1e15, compute=10.0)
    assert after[0].rate == pytest.approx(10 * before[0].rate, rel=0.01)


def test_what_a_strategy_keeps_is_counted():
    shaped = replace(WORK, shapes=((50 * MB,),))  # of four bytes each
    both = [whatif.rows(machine(nodes=1), SCENE, work, {"dgc": True}, allow="exact") for work in (WORK, shaped)]
    assert both[1][0].account.peak - both[0][0].account.peak == 2 * 200 * MB


def test_what_does_not_fit_is_said_with_the_least():
    text = whatif.text(machine(memory=100 * MB), rows(memory=100 * MB))
    assert "nothing fits into 100.0 MiB: the least is" in text
    assert "A prediction: nothing below was run" in text


@pytest.fixture
def probe(tmp_path):
    path = tmp_path / "probe.json"
    path.write_text(json.dumps({"cluster": asdict(SCENE), "work": WORK.written(), "declared": {}}))
    return str(path)


def test_the_command_answers_from_a_stored_probe(probe, tmp_path):
    words = ["plan", "--nodes", "64", "--gpus_per_node", "8", "--link", "25GB/s", "--inner-link", "300GB/s",
             "--memory", "80GiB", "--speed", "40", "--probe", probe]  # fmt: skip
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "512 ranks" in result.output
    assert "40 times as fast" in result.output
    assert "limited by" in result.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give a SCRIPT, or for a prediction --nodes N"),
        (["--nodes", "4"], "--link and --memory must be said too"),
        (["--nodes", "4", "--link", "much", "--memory", "8GiB"], "is not a speed such as"),
        (["--nodes", "4", "--link", "1GB/s", "--memory", "lots"], "is not a number of bytes"),
        (["--nodes", "4", "--link", "1GB/s", "--memory", "8GiB", "--speed", "0"], "--speed must be above 0"),
    ],
)
def test_questions_that_cannot_be_answered_are_refused(words, told, probe):
    result = CliRunner().invoke(main, ["plan", *words, *(["--probe", probe] if words else [])])
    assert result.exit_code != 0
    assert told in result.output


def test_without_a_probe_it_says_where_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("FLEETX_CACHE", str(tmp_path))
    result = CliRunner().invoke(main, ["plan", "--nodes", "2", "--link", "1GB/s", "--memory", "8GiB"])
    assert "there is no probe yet" in result.output
