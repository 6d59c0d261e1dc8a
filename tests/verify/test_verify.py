"""Every combination against the float64 oracle, and every strategy observed to act in it."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from fleetx.cli import main
from fleetx.comm import kernel
from fleetx.errors import NumbersError, StrategyError, UsageError, may_be_built
from fleetx.parts.recompute.chain import Chain
from fleetx.strategy.part import claims, defaults_of, every
from fleetx.strategy.stage import Stage
from fleetx.verify import oracle, own_model, report, runs
from fleetx.verify.combinations import (
    combinations,
    conflicts_of,
    declared,
    switches,
    unbuilt_beside_others,
    unbuilt_messages,
)
from fleetx.verify.judge import Judge, Verdict, distance, key_of, observed, quantities, ranks_for, steps_for
from fleetx.verify.observe import sent_since
from fleetx.verify.ranks import RankError


def name(chosen):
    return "-".join(chosen) or "plain"


ALL = list(combinations(3))
PAIRS = [c for c in ALL if len(c) == 2]
# scope: the tests of one combination follow each other, so that they find each other's runs on the same pytest worker.
each_up_to_two = pytest.mark.parametrize("chosen", [c for c in ALL if len(c) < 3], ids=name, scope="module")


PAGE = Path(__file__).parent.parent.parent / "docs/results/verify.md"


class Shared:
    """A pool whose trainings are made by one pytest worker for all of them."""

    def __init__(self, pool, folder):
        self._pool, self._folder = pool, folder

    def run(self, job, *args):
        if job is not runs.run:
            return self._pool.run(job, *args)
        name = hashlib.sha256(key_of(*args, self._pool.size).encode()).hexdigest()[:32]
        with open(self._folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            result = self._folder / name
            if not result.exists():
                torch.save(self._pool.run(job, *args), result)
            return torch.load(result, weights_only=False)


@pytest.fixture(scope="session")
def judge(ranks, four, common):
    return Judge(pools={pool.size: Shared(pool, common("verified")) for pool in (ranks, four)})


def check(verdict):
    assert verdict.ok, verdict.reason
    for switch, seen in verdict.effects.items():
        assert seen.acts is not False, (switch, seen)
    return verdict


@each_up_to_two
def test_alone_and_in_pairs(judge, chosen):
    verdict = check(judge.judge(chosen))
    assert verdict.ran == (not conflicts_of(declared(chosen)))
    if len(chosen) == 1:  # in a pair, too few replicas may be left to see it
        assert [seen.acts for seen in verdict.effects.values()] == [True]


@pytest.mark.nightly
@pytest.mark.parametrize("chosen", [c for c in ALL if len(c) == 3], ids=name)
def test_in_triples(judge, chosen):
    check(judge.judge(chosen))


def test_the_oracle_knows_every_strategy():
    missing, strays = set(switches()) - oracle.KNOWN, oracle.KNOWN - set(switches())
    told = "add their settings to READS in verify/oracle.py and their formula to update(), or, if they change no number"
    assert not missing, f"{told}, their names to NEUTRAL: {', '.join(sorted(missing))}"
    assert not strays, f"remove from READS or NEUTRAL in verify/oracle.py: {', '.join(sorted(strays))}"


def test_a_strategy_that_the_oracle_does_not_know_is_named(judge, monkeypatch):
    monkeypatch.setattr(oracle, "KNOWN", oracle.KNOWN - {"clip"})
    verdict = judge.judge(("clip",))
    assert (verdict.ok, verdict.effects) == (False, {})
    assert verdict.reason.startswith("verify/oracle.py does not know clip: add")


@pytest.mark.parametrize("switch", switches())
def test_a_strategy_that_does_not_act_is_noticed(judge, switch):
    """A run without it, passed off as a run with it."""
    size = ranks_for((switch,))
    off = judge._run((), (switch,), size, False)
    assert observed(switch, off, off).acts is False


@each_up_to_two
def test_a_strategy_that_stops_acting_is_noticed(judge, chosen):
    """In the last steps of the run with it: the steps of a run without it."""
    if conflicts_of(declared(chosen)):
        return  # it raises an error
    on = judge._run(chosen, chosen, ranks_for(chosen), False)
    for switch in chosen:
        off = judge._run(tuple(s for s in chosen if s != switch), chosen, ranks_for(chosen), False)
        half = len(on[0]["steps"]) // 2
        stopped = [a | {"steps": a["steps"][:half] + b["steps"][half:]} for a, b in zip(on, off, strict=True)]
        assert not observed(switch, stopped, off).acts, switch


@pytest.mark.parametrize("local", ["localsgd", "adaptive_localsgd"])
def test_the_longest_period_ends_in_both_halves(judge, local):
    """That of merged local updates. Otherwise a code that only acts when they are averaged is seen just once."""
    chosen = ("gradient_merge", local)
    on = judge._run(chosen, chosen, 2, False)
    half = len(on[0]["steps"]) // 2
    assert quantities(on, slice(half))["bytes_sent"] > 0
    assert quantities(on, slice(half, None))["bytes_sent"] > 0


def _without_segments(*args):
    """From the second step on, recompute runs every module once, as it once did under pipeline."""
    real, calls = Chain.forward, []

    def forward(chain):
        calls.append(chain)
        return real(chain) if len(calls) <= 2 else nullcontext()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chain, "forward", forward)
        return runs.run(*args)


@pytest.mark.parametrize("chosen", [("recompute",), ("pipeline", "recompute")], ids=name)
def test_recompute_that_stops_after_its_first_segments_is_noticed(judge, chosen):
    size = ranks_for(chosen)
    stopped = judge._pools[size].run(_without_segments, declared(chosen), chosen, torch.float64, steps_for(chosen))
    off = judge._run(tuple(s for s in chosen if s != "recompute"), chosen, size, False)
    assert observed("recompute", stopped, off).acts is False


def test_an_error_says_that_it_is_not_supported_yet_or_why_it_never_can_be():
    """Of every single strategy, pair and triple: here, because looking for them all takes a second."""
    reasons = [stage.because for stage in Stage] + [c.because for p in every().values() for c in claims(p).values()]
    reasons += ["and only one can"]
    problems = {problem: chosen for chosen in ALL for problem in conflicts_of(declared(chosen))}
    assert problems
    for problem, chosen in problems.items():
        assert may_be_built(problem) != any(reason and reason in problem for reason in reasons), (chosen, problem)


def test_what_is_not_supported_yet_is_listed_from_the_errors_themselves():
    pairs, single = list(unbuilt_beside_others()), list(unbuilt_messages())
    assert [text.partition(": ")[0] for text in pairs] == [
        "recompute with memory_budget='min' + pipeline",
        "recompute with memory_budget='min' + sharding",
        "recompute with memory_budget='min' + sync_batch_norm",
    ]
    assert "lars with dampening is not supported yet: pass dampening=0 to SGD" in single
    assert all(may_be_built(text) for text in (*pairs, *single))


def test_the_page_in_the_docs_lists_every_error_as_it_is_now():
    _, heading, listed = PAGE.read_text().partition("## Contradictions\n")
    was, now = (text.splitlines() for text in (heading + listed, report.conflicts(PAIRS)))
    told = [f"does not list: {line}" for line in now if line not in was]
    told += [f"lists what is no error any more: {line}" for line in was if line not in now]
    assert not told, "\n".join(["run fleetx verify --conflicts --output docs/results/verify.md, which:", *told])


def test_the_list_of_conflicts_is_rewritten_without_training(tmp_path):
    page = tmp_path / "v.md"
    page.write_text("measured\n\n## Contradictions\n\n- old\n")
    done = CliRunner().invoke(main, ["verify", "--conflicts", "--output", str(page)])
    assert (done.exit_code, done.output) == (0, "")
    measured, _, listed = page.read_text().partition("## Contradictions\n")
    assert measured == "measured\n\n"
    assert "- old" not in listed
    assert "- lamb + muon: " in listed
    done = CliRunner().invoke(main, ["verify", "--conflicts", "lars", "muon", "clip"])
    assert "- lars + muon: " in done.output
    assert "- lamb + muon: " not in done.output


def test_a_run_that_fails_without_a_strategy_is_a_failure(judge, monkeypatch):
    monkeypatch.setattr(judge, "_effects", lambda verdict: (_ for _ in ()).throw(RankError("no")))
    verdict = judge.judge(("clip",))
    assert (verdict.ok, verdict.reason) == (False, "no")


def test_a_model_that_does_not_move_has_a_distance():
    still, moved = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    assert (distance(still, still, still), distance(moved, still, still)) == (0, math.inf)


def test_numbers_that_are_not_finite_are_within_no_bound():
    still, lost = {"w": torch.zeros(2)}, {"w": torch.tensor([0.0, math.nan])}
    assert distance(lost, {"w": torch.ones(2)}, still) == distance({"w": torch.ones(2)}, lost, still) == math.inf
    masked = {"mask": torch.tensor([0.0, -math.inf])}
    assert distance(still | masked, {"w": torch.ones(2)} | masked, still | masked) == 1


def test_a_model_that_diverges_later_is_not_equal_to_anything():
    torch.manual_seed(0)
    made = nn.Linear(4, 3), 9 * torch.randn(16, 4), torch.randn(16, 3), lambda y, t: (y - t).pow(4).mean()
    own_model._try("mine:example", own_model._finite("mine:example", made), 2)  # the first step is fine
    results = [{"state": made[0].state_dict(), "share": 0}]
    with pytest.raises(UsageError, match=r"^--model mine:example: .* is (nan|-?inf) in plain PyTorch"):
        own_model._numbers("mine:example", own_model._finite("mine:example", made), 6, {}, results, torch.float64)


def test_two_gpus_are_enough_for_what_runs_on_two_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for chosen, needs in ((["clip"], 2), (["clip", "pipeline"], 4)):
        done = CliRunner().invoke(main, ["verify", *chosen, "--device", "cuda"])
        assert f"--device cuda needs {needs} GPUs, but this machine has 1" in done.output


class Raising:
    """A pool whose training raises an error."""

    def __init__(self, error):
        self._error = error

    def run(self, job, *args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runs, "Observer", self._fail)
            return [job(*args)]

    def _fail(self, *args):
        raise self._error


@pytest.mark.parametrize("kind", [NumbersError, UsageError, StrategyError])
def test_an_error_of_the_training_is_no_refusal(kind):
    with pytest.raises(kind, match="ranks differ"):
        Judge(pools={2: Raising(kind("ranks differ"))}).judge(("clip",))


def test_a_wrong_number_is_noticed(judge, monkeypatch):
    def other(*args):
        return {name: t + 1e-6 if t.is_floating_point() else t for name, t in right(*args).items()}

    right = oracle.train
    monkeypatch.setattr(oracle, "train", other)
    verdict = judge.judge(("clip",))
    assert not verdict.ok
    assert "differs from one plain process" in verdict.reason


def test_a_lossy_strategy_is_compared_where_it_loses_nothing(judge):
    amp, sent = check(judge.judge(("amp",))), check(judge.judge(("fp16_allreduce",)))
    assert amp.kind == sent.kind == "lossy"
    assert amp.error < amp.bound == 2e-5 < amp.acting_error < amp.acting_bound
    assert sent.error < sent.bound == 1e-11
    assert "at lossy settings by" in report.details(amp)[0]


def test_another_cast_is_noticed(judge, monkeypatch):
    def without(models, settings):
        right(models, {"fp16_allreduce": {"dtype": "bfloat16"}})

    right = oracle._reduce_in_half
    monkeypatch.setattr(oracle, "_reduce_in_half", without)
    assert not judge.judge(("fp16_allreduce",)).ok


def test_bytes_are_those_of_the_kernel_also_if_another_connection_closes_meanwhile(ranks):
    for sent in ranks.run(_sent):
        assert 80_000 < sent < 90_000


def _sent():
    group = torch.distributed.new_group()
    torch.distributed.all_reduce(torch.zeros(20_000), group=group)
    before = kernel.bytes_sent()
    torch.distributed.destroy_process_group(group)
    torch.distributed.all_reduce(torch.zeros(20_000))  # two ranks: each sends 80 kB
    return sent_since(before)


VERDICTS = [
    Verdict(("clip",), "equal", error=1e-16, bound=1e-11, ranks=2, dtype="float64"),
    Verdict(("dgc",), "lossy"),
    Verdict(("clip", "dgc"), "refused", "clip <bars> momentum"),
    Verdict(("sharding",), "equal"),
    Verdict(("dgc", "sharding"), "unbuilt", "dgc with sharding is not supported yet"),
]


def test_the_matrix_as_text_html_and_json():
    assert [row[1:] for row in report.matrix(VERDICTS)[1:]] == [["=", "", ""], ["x", "~", ""], [" ", "o", "="]]
    assert "2 equal, 1 lossy within bounds, 1 contradiction and 1 not supported yet" in report.text(VERDICTS)
    page = report.page(VERDICTS, "cpu", 1.0)
    assert '<td class="refused">x</td>' in page
    assert "clip &lt;bars&gt; momentum" in page
    data = json.loads(report.as_json(VERDICTS, "cpu", 1.0))
    assert [c["kind"] for c in data["combinations"]] == ["equal", "lossy", "refused", "equal", "unbuilt"]


def test_what_is_shown_in_html_is_never_part_of_it():
    evil = "</pre><script>alert(1)</script>\x1b[2J\"'&"
    verdicts = [dataclasses.replace(v, reason=evil) for v in VERDICTS]
    page = report.page(verdicts, evil, float("nan"))
    assert "<script" not in page
    assert page.count("</pre>") == 1


@pytest.mark.slow
def test_the_command(tmp_path):
    paths = [tmp_path / f"v{suffix}" for suffix in report.FORMATS]
    done = CliRunner().invoke(main, ["verify", "clip", *(a for p in paths for a in ("--output", str(p)))])
    assert done.exit_code == 0, done.output
    assert "the gradient is shorter" in done.output
    assert "| clip | the gradient is shorter" in (tmp_path / "v.md").read_text()
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["clipp"], "there is no strategy 'clipp': did you mean 'clip'?"),
        (["auto"], "auto changes nothing in training itself, so there is nothing to verify: remove it"),
        (["data_parallel"], "data_parallel is on in every combination, so there is nothing to verify: remove it"),
        (["--strategy", __file__], "--strategy needs --model"),
        (["--nproc_per_node", "2"], "--nproc_per_node needs --model"),
        (["--model", "json:dumps", "clip"], "with --model the strategy comes from --strategy"),
        (["--model", "json:dumps", "--all"], "with --model the strategy comes from --strategy"),
        (["--model", "nowhere:none"], "--model nowhere:none: No module named 'nowhere': pass module:function"),
        (["--model", "json"], "--model json: write module:function, such as train:example for example() in train.py"),
        (["--model", "mine.py:two"], "--model mine.py:two: write module:function"),
        (["--model", "json:nothing"], "has no attribute 'nothing'"),
        (["--model", "mine:value"], "value is not a function but 3"),
        (["--model", "mine:two"], "two() returned 2 values, but it must return (model, x, y, loss_fn)"),
        (["--model", "mine:alone"], "alone() returned Linear, but it must return (model, x, y, loss_fn)"),
        (["--model", "mine:lists"], "lists() returned list instead of a tensor: it must return"),
        (["--model", "mine:named"], "named() returned 'mse' instead of a loss function"),
        (
            ["--model", "mine:argument"],
            "argument() raised TypeError: argument() missing 1 required positional argument",
        ),
        (["--model", "mine:broken"], "broken() raised KeyError: 'train.csv' ("),
        (["--model", "mine:shapes"], "loss_fn(model(x), y) and its backward raised RuntimeError: "),
        (["--model", "mine:few"], "x has 1 samples and y has 1: they need equally many, at least one per rank"),
        (["--model", "mine:dropout"], "dropout (0) draws different random numbers on each rank"),
        (["--model", "mine:logs"], "--model mine:logs: loss_fn(model(x), y) is nan in plain PyTorch, without any"),
        (["--model", "mine:roots"], "--model mine:roots: the gradient of weight is nan in plain PyTorch"),
        (["--output", "no/such/x.html"], "there is no folder"),
        (["--model", "json:dumps", "--output", "x.html"], "--output is for the matrix of all strategies: remove it"),
        (["--output", "x.txt"], "--output x.txt: the name must end in .html, .json, .md"),
        (["--model", "json:dumps", "--conflicts"], "--conflicts is for the matrix of all strategies: remove it"),
        (["--conflicts", "--output", "x.html"], "it must be an .md file that fleetx verify has written: pass that"),
        (["--conflicts", "--output", "new.md"], "it must be an .md file that fleetx verify has written: pass that"),
        (["--conflicts", "--output", "other.md"], "--output other.md: it has no heading '## Contradictions': pass"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MISTAKES)
    (tmp_path / "other.md").write_text("# Something else")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    done = CliRunner().invoke(main, ["verify", *arguments])
    assert done.exit_code == 1
    assert message in done.output


MISTAKES = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

x, y, value = torch.zeros(4, 3), torch.zeros(4, 2), 3

def two(): return nn.Linear(3, 2), x
def alone(): return nn.Linear(3, 2)
def lists(): return nn.Linear(3, 2), [1.0], y, mse_loss
def named(): return nn.Linear(3, 2), x, y, "mse"
def argument(n): return None
def broken(): raise KeyError("train.csv")
def shapes(): return nn.Linear(9, 2), x, y, mse_loss
def few(): return nn.Linear(3, 2), x[:1], y[:1], mse_loss
def logs(): return nn.Linear(3, 2), x, y, lambda y, t: (0 * y - 1).log().mean()
def roots(): return nn.Linear(3, 2, bias=False), x, y, lambda y, t: y.sum().sqrt()
def dropout(): return nn.Sequential(nn.Dropout(), nn.Linear(3, 2)), x, y, mse_loss
"""

MODEL = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

def example():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.randn(16, 4), torch.randint(3, (16,)), cross_entropy
"""


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("lars: {exclude_from_weight_decay: [bias]}", "lars with exclude_from_weight_decay=['bias']"),
        ("lars: {lars_coeff: null}", "lars with lars_coeff=None"),
        ("lamb: {always_adapt: true}", "lamb with always_adapt=True"),
        ("localsgd: {k_steps: 2, outer_momentum: 0.5}", "localsgd with outer_momentum=0.5"),
        ("localsgd: {k_steps: 2, average_momentum: true}", "localsgd with average_momentum=True"),
        ("muon: {adamw: ['0']}", "muon with adamw=['0']"),
        ("{auto: true, clip: true}", "auto, which only chooses a strategy: run fleetx plan with your script"),
    ],
)
def test_a_setting_that_the_oracle_does_not_know_is_no_verdict(strategy, said, tmp_path):
    (tmp_path / "mine.yaml").write_text(strategy + "\n")
    done = CliRunner().invoke(main, ["verify", "--model", "mine:example", "--strategy", str(tmp_path / "mine.yaml")])
    assert (done.exit_code, f"verify cannot compute {said}" in done.output) == (2, True), done.output


def test_the_oracle_names_only_settings_that_there_are():
    for switch, reads in oracle.READS.items():
        strays = sorted(reads - set(defaults_of(every()[switch])))
        assert not strays, f"{switch} has no setting {', '.join(strays)}: correct READS in verify/oracle.py"


@pytest.mark.slow
def test_the_model_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "normed.py").write_text(MODEL)
    (tmp_path / "mine.yaml").write_text("gradient_merge: {k_steps: 2}\nclip: {clip_norm: 0.1}\nbatch: {feed: 8}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = CliRunner().invoke(main, ["verify", "--model", "normed:example", "--strategy", "mine.yaml"])
    assert done.exit_code == 0, done.output
    assert "clip + gradient_merge on 2 ranks equals the same training in one plain float64 process" in done.output
    assert "because BatchNorm (1) uses the statistics of each share: turn sync_batch_norm on" in done.output
    assert "gradient_merge acts: fewer steps update" in done.output
    assert "batch was left out: verify itself splits your batch between the ranks" in done.output


def test_the_steps_of_the_user_s_model_are_two_periods_and_the_first_two():
    assert runs.steps_for({"clip": {}}) == 6
    assert runs.steps_for({"gradient_merge": {"k_steps": 4}}) == 10
    assert runs.steps_for({"localsgd": {"k_steps": 8}}) == 18
    assert runs.steps_for({"gradient_merge": {"k_steps": 2}, "adaptive_localsgd": {"init_k_steps": 4}}) == 22


WIDE = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

def example():
    return nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 3)), torch.randn(16, 128), torch.randn(16, 3), mse_loss
"""


@pytest.mark.slow
def test_a_lossy_strategy_on_the_model_of_the_user(tmp_path, monkeypatch):
    """Compared at settings that lose nothing; dgc keeps the settings that it has beside lamb where lamb is left out."""
    (tmp_path / "wider.py").write_text(WIDE)
    (tmp_path / "mine.yaml").write_text("dgc: true\nlamb: true\ngradient_merge: {k_steps: 8}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = CliRunner().invoke(main, ["verify", "--model", "wider:example", "--strategy", "mine.yaml"])
    assert done.exit_code == 0, done.output
    assert "dgc was compared with {'sparsity': [0.0]}, because it loses precision otherwise" in done.output
    for effect in ("dgc acts", "lamb acts", "gradient_merge acts"):
        assert effect in done.output


def test_effects_are_sentences():
    for part in every().values():
        if part.effect:
            assert part.effect.sentence.split()[0].islower()
