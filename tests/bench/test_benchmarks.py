"""The frame of the benchmarks: what it makes of samples. No test here depends on how long anything takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import __main__ as command
from benchmarks.frame import CannotRunError, Run, Sides, benchmark, interleave, ranks
from benchmarks.frame.declare import UnknownBenchmarkError, chosen, every
from benchmarks.frame.interleave import count_calls
from benchmarks.frame.result import divided
from benchmarks.frame.verdict import Verdict, interval, judge, percentile, ratio_of


# --- benchmarks that cost nothing; their functions run in processes of their own -------------------
@benchmark(ours="x", theirs="y", goal=1.5)
def good(run: Run) -> Sides:
    """Two numbers."""
    return Sides([2.0, 2.2] * (run.rounds // 2), [2.0] * run.rounds, notes={"parent": os.getppid()})


@benchmark(ours="x", theirs="y", goal=1.0)
def bad(run: Run) -> Sides:
    return Sides([2.0] * run.rounds, [1.0] * run.rounds)


@benchmark(ours="x", theirs="y")
def broken(run: Run) -> Sides:
    raise ArithmeticError("they disagree")


@benchmark(ours="x", theirs="y")
def homeless(run: Run) -> Sides:
    raise CannotRunError("there is no network to shape")


@benchmark(ours="x", theirs="y", goal=1.0, ranks=2)
def paired(run: Run) -> Sides:
    return run.compare(lambda: sum([1, 2]), lambda: sum([1]), rank=run.rank, size=run.size)


KNOWN = {f.benchmark.name: f.benchmark for f in (good, bad, broken, homeless)}


def forever() -> None:
    time.sleep(60)


def die() -> None:
    print("these are my last words", flush=True)
    os._exit(7)


def leave_a_child() -> int:
    return subprocess.Popen(["sleep", "60"]).pid


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# --- samples ---------------------------------------------------------------------------------------
def test_the_sides_take_turns_in_being_first():
    order = []
    a, b = interleave(lambda: order.append("a") or 1.0, lambda: order.append("b") or 2.0, rounds=4, warm_up=1)
    assert "".join(order) == "ab" + "abbaabba"
    assert (a, b) == ([1.0] * 4, [2.0] * 4)


def test_samples_without_a_partner_are_refused():
    with pytest.raises(ValueError, match="come in pairs: 2 of ours, 1 of theirs"):
        Sides([1.0, 2.0], [1.0])


def test_a_comparison_counts_the_calls_of_each_step():
    def calls(n: int) -> None:
        for _ in range(n):
            abs(-1)

    sides = Run(rounds=2).compare(lambda: calls(20), lambda: calls(10), steps=5)
    ours, theirs = sides.counts["calls a step"]
    assert sides.cpu is not None
    assert len(sides.ours) == len(sides.theirs) == len(sides.cpu.ours) == len(sides.cpu.theirs) == 2
    assert ours - theirs == pytest.approx(2)


def test_the_count_of_calls_is_the_same_each_time():
    def work():
        return sorted([3, 1, 2], key=lambda x: -x)

    assert count_calls(work) == count_calls(work) > 3


def test_the_rounds_are_divided_evenly_among_the_starts():
    assert divided(100, starts=4) == [26, 26, 26, 26]
    assert divided(10, starts=1) == [10]
    assert divided(7, starts=4) == [8], "so few are not worth several starts"
    assert divided(1, starts=4) == [2]


def test_every_other_start_makes_their_side_first():
    made = []
    for start in range(2):
        assert Run(1, start=start).both(lambda: made.append("a") or 1, lambda: made.append("b") or 2) == (1, 2)
    assert made == ["a", "b", "b", "a"]


# --- ratios ----------------------------------------------------------------------------------------
def test_the_ratio_is_the_median_of_the_pairs_and_not_the_ratio_of_the_medians():
    ratio = ratio_of(Sides([1.0, 20.0, 3.0], [1.0, 10.0, 1.0], steps=2))
    assert ratio.value == 2.0
    assert ratio.of_medians == 3.0
    assert ratio.of_minima == 1.0
    assert ratio.difference == 1.0  # the middle of 0, 10 and 2, over two steps


def test_the_interval_is_that_of_the_sign_test():
    assert interval(list(map(float, range(1, 21)))) == (6.0, 15.0)  # the tables: ranks 6 and 15 of 20
    assert interval(list(map(float, range(1, 7)))) == (1.0, 6.0)
    assert interval([5.0]) == (5.0, 5.0)


def test_the_interval_holds_the_true_median_as_often_as_it_says():
    import random

    draw = random.Random(0)
    hits = 0
    for _ in range(1000):
        low, high = interval(sorted(draw.lognormvariate(0, 1) for _ in range(15)))
        hits += low <= 1.0 <= high  # the median of exp(N(0, 1)) is 1
    assert 950 <= hits <= 985  # P = 1 - 2 * P(Binomial(15, 1/2) < 4) = 0.965


def test_a_percentile_lies_between_its_two_samples():
    assert percentile([0.0, 10.0], 0.9) == 9.0
    assert percentile([7.0], 0.1) == 7.0


# --- verdicts --------------------------------------------------------------------------------------
def verdict_on(ours: list[float], goal: float | None) -> tuple[Verdict, str]:
    return judge(ratio_of(Sides(ours, [1.0] * len(ours))), goal=goal)


def test_a_goal_is_met_when_the_whole_interval_is_below_it():
    assert verdict_on([1.0, 1.01, 1.0, 1.01, 1.0, 1.01], 1.02) == (Verdict.MET, "")


def test_a_goal_is_not_met_when_the_whole_interval_is_above_it():
    assert verdict_on([1.05, 1.06, 1.05, 1.06, 1.05, 1.06], 1.02) == (Verdict.NOT_MET, "")


def test_the_verdict_is_withheld_when_the_goal_lies_inside_the_interval():
    verdict, reason = verdict_on([1.0, 1.04, 1.0, 1.04, 1.0, 1.04], 1.02)
    assert verdict is Verdict.TOO_NOISY
    assert "1.000 to 1.040" in reason


def test_the_verdict_is_withheld_when_the_pairs_spread_too_far():
    verdict, reason = verdict_on([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0], 1.2)
    assert verdict is Verdict.TOO_NOISY
    assert "spread over" in reason


def test_no_spread_withholds_a_verdict_on_which_every_pair_agrees():
    assert verdict_on([0.1, 0.2, 0.3, 0.1, 0.2, 0.3], 1.1)[0] is Verdict.MET
    assert verdict_on([2.0, 3.0, 4.0, 2.0, 3.0, 4.0], 1.1)[0] is Verdict.NOT_MET
    assert verdict_on([0.1, 0.2, 0.3], 1.1)[0] is Verdict.TOO_NOISY, "three pairs may agree by chance"


def test_many_pairs_carry_a_verdict_however_far_they_spread():
    wide = [0.5, 1.0, 1.0, 1.0, 1.0, 2.0]  # the interval of the median holds whatever their distribution
    assert verdict_on(wide * 4, 1.2)[0] is Verdict.TOO_NOISY
    assert verdict_on(wide * 20, 1.2)[0] is Verdict.MET


def test_a_budget_is_about_the_seconds_that_a_step_takes_longer():
    def on(ours):
        return judge(ratio_of(Sides(ours, [1.0] * len(ours), steps=2)), goal=None, budget=0.1)

    assert on([1.1, 1.2] * 3) == (Verdict.MET, "")
    assert on([1.3, 1.4] * 3) == (Verdict.NOT_MET, "")
    verdict, reason = on([1.1, 1.3] * 3)
    assert verdict is Verdict.TOO_NOISY
    assert "+50 ms to +150 ms" in reason


def test_without_a_goal_the_ratio_is_only_reported():
    assert verdict_on([1.0, 9.0], None) == (Verdict.REPORTED, "")


# --- which ones ------------------------------------------------------------------------------------
def test_a_file_in_the_folder_is_all_it_takes(tmp_path, monkeypatch):
    folder = tmp_path / "more_benchmarks"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "speed.py").write_text(
        "from benchmarks.frame import benchmark\n@benchmark(ours='a', theirs='b')\ndef fast(run):\n    'How fast.'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = every("more_benchmarks")
    assert list(found) == ["speed.fast"]
    assert found["speed.fast"].meaning == "How fast."


def test_a_file_without_a_benchmark_is_an_error(tmp_path, monkeypatch):
    folder = tmp_path / "no_benchmarks"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "empty.py").write_text("from test_benchmarks import good\n")  # somebody else's
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TypeError, match=r"no_benchmarks/empty.py defines no benchmark"):
        every("no_benchmarks")


def test_the_benchmarks_of_fleetx_are_found():
    assert {"overhead.merged", "overhead.plain", "launch.first_line"} <= set(every())


def test_a_name_means_a_file_or_one_benchmark_in_it():
    assert [b.name for b in chosen(["test_benchmarks"], KNOWN)] == list(KNOWN)
    assert [b.name for b in chosen(["test_benchmarks.bad"], KNOWN)] == ["test_benchmarks.bad"]
    assert [b.name for b in chosen([], KNOWN)] == list(KNOWN)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownBenchmarkError, match=r"'overhed'.*did you mean 'overhead'\?"):
        chosen(["overhed"], every())
    with pytest.raises(UnknownBenchmarkError, match=r"There are: .*overhead\.plain"):
        chosen(["zzz"], every())


# --- processes -------------------------------------------------------------------------------------
def test_a_rank_that_takes_too_long_is_ended():
    with pytest.raises(ranks.RankError, match=r"ranks \[0\] took longer than 0.5 s"):
        ranks.run(forever, size=1, seconds=0.5)


def test_a_rank_that_dies_leaves_its_last_words():
    with pytest.raises(ranks.RankError, match=r"rank 0 ended with 7:\nthese are my last words"):
        ranks.run(die, size=1, seconds=30)


def test_what_a_rank_has_started_ends_with_it():
    (pid,) = ranks.run(leave_a_child, size=1, seconds=30)
    for _ in range(100):
        if not alive(pid):
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still running")


def test_two_ranks_measure_together_and_rank_0_reports(tmp_path):
    result = command.measured(paired.benchmark, rounds=3, out=tmp_path)
    assert result.reason == "" or result.verdict is Verdict.TOO_NOISY
    assert result.sides.notes == {"rank": 0, "size": 2}
    assert len(result.sides.ours) == len(result.sides.theirs) == 4, "an even number: each side is first as often"


# --- the command -----------------------------------------------------------------------------------
def run(monkeypatch, tmp_path, *arguments):
    monkeypatch.setattr(command, "every", lambda: KNOWN)
    monkeypatch.setenv("COLUMNS", "120")
    return CliRunner().invoke(command.main, [*arguments, "--out", str(tmp_path)])


def test_a_run_prints_a_table_and_writes_what_it_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    out = run(monkeypatch, tmp_path, "test_benchmarks.good", "--rounds", "12")
    assert out.exit_code == 0, out.output
    assert "1.050" in out.output
    assert "≤ 1.5" in out.output
    written = json.loads((tmp_path / "test_benchmarks.good.json").read_text())
    assert written["name"] == "test_benchmarks.good"
    assert written["meaning"] == "Two numbers."
    assert written["goal"] == 1.5
    assert written["verdict"] == "met"
    assert written["ratio"] == pytest.approx(1.05)
    assert written["ours"]["samples"] == [2.0, 2.2] * 6, "from two starts"
    assert written["ratio_by_start"] == [pytest.approx(1.05)] * 2
    assert written["theirs"]["minimum"] == written["theirs"]["median"] == 2.0
    assert written["notes"]["parent"] == os.getpid(), "it ran in a process of its own"
    assert written["threads_per_rank"] == 1
    assert written["machine"]["environment"]["MALLOC_MMAP_MAX_"] == "0"
    assert {"cpu", "cores", "memory_gib", "torch", "python"} <= set(written["machine"])
    assert len(written["load_before"]) == len(written["load_after"]) == 3
    assert written["date"][:2] == "20"
    assert written["command"]


def test_a_missed_goal_fails_only_the_strict(monkeypatch, tmp_path):
    mild = run(monkeypatch, tmp_path, "test_benchmarks.bad", "--quick")
    assert "not met" in mild.output
    assert mild.exit_code == 0
    assert run(monkeypatch, tmp_path, "test_benchmarks.bad", "--quick", "--strict").exit_code == 1


def test_a_benchmark_that_breaks_fails_and_says_why_and_the_others_still_run(monkeypatch, tmp_path):
    out = run(monkeypatch, tmp_path, "test_benchmarks.broken", "test_benchmarks.good", "--quick")
    assert out.exit_code == 1
    assert "ArithmeticError: they disagree" in out.output
    assert "Traceback" in out.output
    assert "met" in out.output
    assert json.loads((tmp_path / "test_benchmarks.broken.json").read_text())["ratio"] is None


def test_a_benchmark_that_cannot_run_here_says_why_and_fails_only_the_strict(monkeypatch, tmp_path):
    out = run(monkeypatch, tmp_path, "test_benchmarks.homeless")
    assert "cannot run: there is no network to shape" in " ".join(out.output.split())
    assert out.exit_code == 0
    assert command.exit_code([Verdict.CANNOT_RUN], strict=True) == 1
    assert command.exit_code([Verdict.TOO_NOISY], strict=True) == 1
    assert command.exit_code([Verdict.MET, Verdict.REPORTED], strict=True) == 0


def test_an_unknown_name_on_the_command_line_is_a_usage_error(monkeypatch, tmp_path):
    out = run(monkeypatch, tmp_path, "test_benchmarks.god")
    assert out.exit_code == 2
    assert "did you mean 'test_benchmarks.good'?" in out.output


def page(monkeypatch, folder, text="before\n<!-- the tables -->\nold\n<!-- end of the tables -->\nafter\n"):
    monkeypatch.setattr(sys.modules[__name__], "PAGE", "page.md", raising=False)
    monkeypatch.setattr(command.pages, "RESULTS", folder)
    (folder / "page.md").write_text(text)
    return folder / "page.md"


def test_tables_are_written_between_the_marks_of_a_page(monkeypatch, tmp_path):
    path = page(monkeypatch, tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "KNOWN", {b.name: b for b in (good.benchmark, homeless.benchmark)})
    out = run(monkeypatch, tmp_path, "--rounds", "12", "--write")
    assert "wrote" in out.output
    before, _, rest = path.read_text().partition("<!-- the tables -->\n")
    table, _, after = rest.partition("<!-- end of the tables -->\n")
    assert (before, after) == ("before\n", "after\n")
    machine, _, _, _, first, second = table.splitlines()
    assert machine.startswith("Machine: ")
    assert machine.endswith('Command: `make bench ARGS="test_benchmarks"`.')
    assert first.startswith("| `test_benchmarks.good` | Two numbers (x / y) |")
    assert first.endswith("| 1.050 | 1.000 to 1.100 | at most 1.5 | met |")
    assert second.endswith("|  |  |  |  |  | cannot run |")
    (tmp_path / "page.md").write_text("<!-- the tables --><!-- end of the tables -->")
    run(monkeypatch, tmp_path, "test_benchmarks.good", "--write", "--measured")
    assert table in path.read_text(), "from what was measured before"


def test_a_page_of_which_something_was_not_run_stays_as_it_is(monkeypatch, tmp_path):
    path = page(monkeypatch, tmp_path)
    old = path.read_text()
    monkeypatch.setattr(sys.modules[__name__], "KNOWN", {b.name: b for b in (good.benchmark, bad.benchmark)})
    out = run(monkeypatch, tmp_path, "test_benchmarks.good", "--rounds", "4", "--write")
    assert "has no results of test_benchmarks.bad" in " ".join(out.output.split())
    assert path.read_text() == old
    assert run(monkeypatch, tmp_path, "test_benchmarks.good", "--quick", "--write").exit_code == 2
    run(monkeypatch, tmp_path, "test_benchmarks.good", "--write", "--measured", "--partial")
    assert "Not measured in this run: `test_benchmarks.bad`." in path.read_text()


def test_every_page_that_a_file_declares_has_its_marks():
    pages = {command.pages.page_of(b) for b in every().values()} - {""}
    assert pages == {
        f"{name}.md" for name in ("overhead", "loaders", "optimizers", "muon", "pipeline", "checkpoints", "checks")
    }
    for name in pages:
        text = (command.pages.RESULTS / name).read_text()
        assert text.index(command.pages.BEGIN) < text.index(command.pages.END)


def test_the_list_runs_nothing(monkeypatch, tmp_path):
    out = run(monkeypatch, tmp_path, "--list")
    assert out.exit_code == 0
    assert "test_benchmarks.good" in out.output
    assert "Two numbers. (x / y)" in out.output
    assert not list(tmp_path.iterdir())
