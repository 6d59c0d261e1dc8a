"""Predictions for other clusters, from a stored profile."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner
from test_cost import CLUSTER, MB, PROFILE

from fleetx.cli import main
from fleetx.planner import whatif
from fleetx.planner.cache import StoredProfile
from fleetx.planner.candidates import seconds_on


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("25GB/s", 25e9), ("100Mbit/s", 12.5e6), ("1 Gbit/s", 125e6), ("10Gbps", 1.25e9), ("8b/s", 1.0)],
)
def test_speeds_are_read_as_people_write_them(text, bytes_):
    assert whatif.speed(text) == pytest.approx(bytes_)


@pytest.mark.parametrize("text", ["fast", "25", "0GB/s", "25GiB", "-1GB/s"])
def test_an_invalid_speed_is_an_error(text):
    with pytest.raises(ValueError, match="is not a speed such as"):
        whatif.speed(text)


def machine(**changed):
    made = {"nodes": 8, "per_node": 2, "link": 100.0 * MB, "inner": 1e12, "memory": 1 << 40} | changed
    return whatif.Machine(**made)


def rows(profile=PROFILE, declared=None, **changed):
    return whatif.rows(machine(**changed), StoredProfile(CLUSTER, profile, declared or {}), allow="exact")


def test_a_slow_link_limits_and_a_fast_one_does_not():
    slow, fast = rows(link=10.0 * MB), rows(link=1e13)
    assert [row.nodes for row in slow] == [1, 2, 4, 8]
    assert slow[-1].best.cost.bottleneck(1 << 40) == "link"
    assert fast[-1].best.cost.bottleneck(1 << 40) == "compute"
    assert fast[-1].rate > slow[-1].rate
    assert fast[-1].rate == pytest.approx(8 * fast[0].rate, rel=0.1)


def test_faster_devices_are_faster_by_the_stated_factor():
    before, after = rows(link=1e15), rows(link=1e15, compute=10.0)
    assert after[0].rate == pytest.approx(10 * before[0].rate, rel=0.01)


def test_what_a_strategy_keeps_is_counted():
    shaped = replace(PROFILE, shapes=((50 * MB,),))  # of four bytes each
    both = [rows(profile, {"dgc": True}, nodes=1)[0].best.cost.peak for profile in (PROFILE, shaped)]
    assert both[1] - both[0] == 4 * 200 * MB


def test_if_nothing_fits_the_least_is_shown():
    text = whatif.text(machine(memory=100 * MB), rows(memory=100 * MB))
    assert "nothing fits into 100.0 MiB: the least is" in text
    assert "This is a prediction: nothing below was run" in text


def curves(allow="lossy", **changed):
    return whatif.curves(machine(**changed), StoredProfile(CLUSTER, PROFILE, {}), allow=allow)


def test_on_a_slow_link_compression_is_best_and_on_a_fast_one_it_does_not_pay():
    found = curves()
    (start, slowest), *others = whatif.crossovers(found)
    assert start == 0.0
    savers = {"dgc", "localsgd", "adaptive_localsgd", "quantized_allreduce", "fp16_allreduce"}
    assert savers & set(slowest.name.split(" + "))
    places = [place for place, _ in others]
    assert places == sorted(places)
    assert not savers & set(others[-1][1].name.split(" + "))
    assert all(curve.rates[max(curve.rates)] >= curve.rates[min(curve.rates)] for curve in found)


def test_curves_meet_where_they_are_equal():
    a = whatif.Curve("a", {1.0: 4.0, 100.0: 4.0})
    b = whatif.Curve("b", {1.0: 1.0, 100.0: 16.0})
    assert [(round(place), curve.name) for place, curve in whatif.crossovers([a, b])] == [(0, "a"), (10, "b")]
    assert [curve.name for _, curve in whatif.crossovers([a])] == ["a"]


def test_a_plan_costs_the_same_on_the_same_links():
    stored = StoredProfile(CLUSTER, PROFILE, {})
    cluster, candidates = whatif._candidates(machine(), 8, stored, "exact")
    assert candidates
    for candidate in candidates:
        assert seconds_on(cluster, candidate, PROFILE) == candidate.cost.seconds


def test_the_best_strategies_are_listed_by_bandwidth():
    a = whatif.Curve("dgc", {1e6: 4.0, 1e8: 4.0})
    b = whatif.Curve("data parallelism", {1e6: 1.0, 1e8: 16.0})
    assert whatif.by_link(machine(), [a, b]).splitlines() == [
        "best with 8 nodes, by the bandwidth between them:",
        "  less than 80 Mbit/s         dgc",
        "  80 Mbit/s or more           data parallelism",
    ]


@pytest.mark.parametrize(("speed", "words"), [(1.25e7, "100 Mbit/s"), (2.5e9, "20 Gbit/s"), (10.0, "80 bit/s")])
def test_speeds_are_shown_as_networks_are_sold(speed, words):
    assert whatif.speed_text(speed) == words


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_crossover_is_drawn(tmp_path):
    whatif.plot(machine(), rows(), curves(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(StoredProfile(CLUSTER, PROFILE, {}))))
    return path


QUESTION = ["plan", "--nodes", "64", "--gpus_per_node", "8", "--link", "25GB/s", "--inner-link", "300GB/s"]
QUESTION += ["--memory", "80GiB", "--speed", "40"]


@pytest.mark.parametrize("option", ["--profile", "--probe"])
def test_the_command_answers_from_a_stored_profile(option, profile):
    result = CliRunner().invoke(main, [*QUESTION, option, str(profile)])
    assert result.exit_code == 0, result.output
    assert "512 ranks" in result.output
    assert "40 times as fast" in result.output
    assert "limited by" in result.output
    assert "best with 64 nodes, by the bandwidth between them:" in result.output


@pytest.mark.parametrize("change", [{"version": 2}, {"cluster": {}}])
def test_a_profile_in_another_format_is_an_error(change, profile):
    profile.write_text(json.dumps(json.loads(profile.read_text()) | change))
    result = CliRunner().invoke(main, [*QUESTION, "--profile", str(profile)])
    assert result.exit_code == 1
    assert "is not a profile that this version of fleetx can read" in result.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give a SCRIPT"),
        (["--nodes", "4"], "--nodes 4 needs --link and --memory too"),
        (["--nodes", "4", "--link", "much", "--memory", "8GiB"], "is not a speed such as"),
        (["--nodes", "4", "--link", "1GB/s", "--memory", "lots"], "is not a number of bytes"),
        (["--nodes", "4", "--link", "1GB/s", "--memory", "8GiB", "--speed", "0"], "--speed must be greater than 0"),
        (["--nodes", "4", "--link", "1GB/s", "--memory", "8GiB", "--global_batch", "6"], "cannot be split evenly"),
    ],
)
def test_invalid_questions_are_errors(words, told, profile):
    result = CliRunner().invoke(main, ["plan", *words, *(["--profile", str(profile)] if words else [])])
    assert result.exit_code != 0
    assert told in result.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nodes", "4", "--memory", "8GiB", "--link", "fast"], "Invalid value for '--link': 'fast' is not a speed"),
        (["--nodes", "4", "--memory", "8GiB", "--link", "-5Gbit/s"], "'-5Gbit/s' is not a speed such as '25GB/s'"),
        (["--nodes", "4", "--link", "1GB/s", "--memory", "8GiB", "--inner-link", "0GB/s"], "'--inner_link': '0GB/s'"),
        (["--nodes", "4", "--link", "1GB/s", "--memory", "lots"], "Invalid value for '--memory'"),
        (["--nodes", "4", "--link", "1GB/s"], "--nodes 4 needs --memory too"),
        (["--link", "1GB/s"], "--link only matters to a prediction: add --nodes N, or remove it"),
    ],
)
def test_an_invalid_question_is_told_before_the_script_runs(words, told, tmp_path):
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    with contextlib.chdir(tmp_path):
        result = CliRunner().invoke(main, ["plan", *words, "train.py"])
    assert result.exit_code != 0
    assert told in result.output
    assert not (tmp_path / "ran").exists()


def test_without_a_profile_the_error_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("FLEETX_CACHE", str(tmp_path))
    result = CliRunner().invoke(main, ["plan", "--nodes", "2", "--link", "1GB/s", "--memory", "8GiB"])
    assert "no profile is stored yet" in result.output
