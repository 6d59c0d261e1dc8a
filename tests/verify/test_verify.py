"""Every combination against the float64 oracle, and every strategy observed to act in it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from click.testing import CliRunner

from fleetx.cli import main
from fleetx.strategy.part import every
from fleetx.verify import oracle, report
from fleetx.verify.combinations import combinations, switches
from fleetx.verify.judge import Judge, Verdict, observed
from fleetx.verify.observe import bytes_sent

ALL = list(combinations(3))
PAIRS = [c for c in ALL if len(c) == 2]


def name(chosen):
    return "-".join(chosen) or "plain"


@pytest.fixture(scope="session")
def judge(ranks, four):
    return Judge(pools={2: ranks, 4: four})


def check(verdict):
    assert verdict.ok, verdict.reason
    for switch, seen in verdict.effects.items():
        assert seen.acts is not False, (switch, seen)
    return verdict


@pytest.mark.parametrize("chosen", [c for c in ALL if len(c) < 2], ids=name)
def test_alone(judge, chosen):
    verdict = check(judge.judge(chosen))
    assert verdict.kind != "refused"
    assert [seen.acts for seen in verdict.effects.values()] == [True] * len(chosen)


@pytest.mark.parametrize("chosen", PAIRS, ids=name)
def test_in_pairs(judge, chosen):
    check(judge.judge(chosen))


@pytest.mark.nightly
@pytest.mark.parametrize("chosen", [c for c in ALL if len(c) == 3], ids=name)
def test_in_triples(judge, chosen):
    check(judge.judge(chosen))


def test_the_oracle_knows_every_strategy():
    assert set(switches()) == oracle.KNOWN


@pytest.mark.parametrize("switch", switches())
def test_a_strategy_that_does_not_act_is_noticed(judge, switch):
    """A run without it, passed off as a run with it."""
    size = 4 if switch in ("pipeline", "use_hierarchical_allreduce") else 2
    off = judge._run((), (switch,), size, False)
    assert observed(switch, off, off).acts is False


def test_a_wrong_number_is_noticed(judge, monkeypatch):
    def other(*args):
        return {name: t + 1e-6 if t.is_floating_point() else t for name, t in right(*args).items()}

    right = oracle.train
    monkeypatch.setattr(oracle, "train", other)
    verdict = judge.judge(("clip",))
    assert not verdict.ok
    assert "differs from one plain process" in verdict.reason


def test_bytes_are_those_of_the_kernel(ranks):
    for sent in ranks.run(_sent):
        assert 80_000 < sent < 90_000


def _sent():
    before = bytes_sent()
    torch.distributed.all_reduce(torch.zeros(20_000))  # two ranks: each sends 80 kB
    return bytes_sent() - before


VERDICTS = [
    Verdict(("clip",), "equal", error=1e-16, bound=1e-11, ranks=2, dtype="float64"),
    Verdict(("dgc",), "lossy"),
    Verdict(("clip", "dgc"), "refused", "clip <bars> momentum"),
]


def test_the_matrix_as_text_html_and_json():
    assert report.matrix(VERDICTS) == [["", "1", "2"], ["1 clip", "=", ""], ["2 dgc", "x", "~"]]
    assert "3 combinations: 1 equal, 1 lossy within bounds, 1 raise an error, 0 failed" in report.text(VERDICTS)
    page = report.page(VERDICTS, "cpu", 1.0)
    assert '<td class="refused">x</td>' in page
    assert "clip &lt;bars&gt; momentum" in page
    data = json.loads(report.as_json(VERDICTS, "cpu", 1.0))
    assert [c["kind"] for c in data["combinations"]] == ["equal", "lossy", "refused"]


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
        (["--strategy", __file__], "--strategy needs --model"),
        (["--nproc_per_node", "2"], "--nproc_per_node needs --model"),
        (["--model", "json:dumps", "clip"], "with --model the strategy comes from --strategy"),
        (["--model", "json:dumps", "--all"], "with --model the strategy comes from --strategy"),
        (["--model", "nowhere:none"], "--model nowhere:none: No module named 'nowhere': pass module:function"),
        (["--model", "json:dumps", "--output", "x.html"], "--output is for the matrix of all strategies: remove it"),
        (["--output", "x.txt"], "--output x.txt: the name must end in .html, .json, .md"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    done = CliRunner().invoke(main, ["verify", *arguments])
    assert done.exit_code == 1
    assert message in done.output


MODEL = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

def example():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.randn(16, 4), torch.randint(3, (16,)), cross_entropy
"""


@pytest.mark.slow
def test_the_model_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "mine.yaml").write_text("gradient_merge: {k_steps: 2}\nclip: {clip_norm: 0.1}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = CliRunner().invoke(main, ["verify", "--model", "mine:example", "--strategy", "mine.yaml"])
    assert done.exit_code == 0, done.output
    assert "clip + gradient_merge on 2 ranks equals the same training in one plain float64 process" in done.output
    assert "because BatchNorm (1) uses the statistics of each share: turn sync_batch_norm on" in done.output
    assert "gradient_merge acts: fewer steps update" in done.output


def test_effects_are_sentences():
    for part in every().values():
        if part.effect:
            assert part.effect.sentence.split()[0].islower()
