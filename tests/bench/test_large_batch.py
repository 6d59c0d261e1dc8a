"""The study of large batches, on images that are made up here. What it finds is in docs/results, not tested."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
import math
import re
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is not installed

from benchmarks.frame import CannotRunError
from benchmarks.large_batch import __main__ as command
from benchmarks.large_batch import report, text, worker
from benchmarks.large_batch.data import FILES, load
from benchmarks.large_batch.model import ResNet
from benchmarks.large_batch.recipe import RECIPES, groups
from benchmarks.large_batch.runs import Kept, Outcome, Run
from benchmarks.large_batch.summary import summarised
from benchmarks.large_batch.sweep import Plan, chosen, following, left
from benchmarks.large_batch.tasks import SHARES, TASKS
from benchmarks.large_batch.train import stream

from fleetx import fleet
from fleetx.comm.session import reset

ROOT = Path(__file__).parents[2]
HELD, TRAINED = 100, 480
QUICK = {"epochs": 1, "seeds": 1, "steps": [0], "extensions": 0, "decays": []}
TINY = Plan("images", ["sgd", "lars"], [0.005, 0.01], samples=TRAINED, **QUICK)
PLAN = Plan("images", ["sgd", "lamb"], [0.005, 0.01], epochs=1, seeds=3, samples=TRAINED)


@pytest.fixture
def images(tmp_path) -> Path:
    """Each class is a bright row in noise."""
    folder = tmp_path / "images"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for (pixels, labels), n in zip(FILES.values(), (TRAINED + HELD, 200), strict=True):
        y = generator.integers(0, 10, n).astype(np.uint8)
        x = generator.integers(0, 60, (n, 28, 28)).astype(np.uint8)
        x[np.arange(n), 2 * y + 4] = 255
        (folder / pixels).write_bytes(gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, n, 28, 28) + x.tobytes()))
        (folder / labels).write_bytes(gzip.compress(struct.pack(">4BI", 0, 0, 8, 1, n) + y.tobytes()))
    return folder


def outcome(accuracy: float, test: float | None = None) -> Outcome:
    return Outcome(updates=2, chosen_on=accuracy, test=accuracy if test is None else test, loss=1.0, seconds=1.0)


def played(plan: Plan, accuracy) -> dict[Run, Outcome]:
    """The whole study, with accuracy(run) in place of training."""
    done: dict[Run, Outcome] = {}
    while (run := following(plan, done)) is not None:
        assert run not in done
        assert left(plan, done) > 0
        done[run] = outcome(accuracy(run))
    assert left(plan, done) == 0
    return done


# --- data ------------------------------------------------------------------------------------------
def test_the_images_that_choose_are_not_among_those_that_train(images):
    split = load(images, train=TRAINED)
    assert (len(split.train), len(split.choose), len(split.test)) == (TRAINED, HELD, 200)
    assert split.train.pixels.shape == (TRAINED, 1, 28, 28)
    row = split.test.pixels[0, 0].float().mean(1).argmax().item()
    assert row == 2 * split.test.labels[0].item() + 4, "pixels and labels belong together"
    assert split.train.normalised().dtype is torch.float32


def test_a_missing_data_set_is_named_with_its_package(tmp_path):
    out = CliRunner().invoke(command.main, ["--data", str(tmp_path), "--out", str(tmp_path / "out")])
    assert out.exit_code == 1
    assert "apt-get install dataset-fashion-mnist" in out.output
    assert "train-images-idx3-ubyte.gz" in out.output
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_format_is_refused(images):
    (images / FILES["test"][0]).write_bytes(gzip.compress(b"\x89PNG rubbish"))
    with pytest.raises(CannotRunError, match="not an idx file of unsigned bytes"):
        load(images, train=TRAINED)


def test_the_order_of_the_images_depends_on_seed_and_epoch_alone():
    two, three = stream(50, epochs=2, seed=1), stream(50, epochs=3, seed=1)
    assert torch.equal(two, three[:100])
    assert sorted(two[:50].tolist()) == sorted(two[50:].tolist()) == list(range(50))
    assert not torch.equal(two[:50], two[50:])
    assert not torch.equal(two, stream(50, epochs=2, seed=2))


# --- the recipe ------------------------------------------------------------------------------------
def test_bias_and_batch_norm_are_not_decayed():
    model = ResNet()
    decayed, plain = (group["params"] for group in groups(model, 0.1))
    assert all(p.ndim > 1 for p in decayed)
    assert all(p.ndim == 1 for p in plain)
    assert len(decayed) + len(plain) == len(list(model.parameters()))


def test_neighbouring_rates_are_a_factor_of_two_apart_and_decays_of_four():
    images = TASKS["images"]
    assert [RECIPES["sgd"].rate(images, 0.005, step) for step in (-1, 0, 1)] == [0.4, 0.8, 1.6]
    assert RECIPES["lamb"].rate(images, 0.1, 0) == pytest.approx(
        20**0.5 * RECIPES["lamb"].rate(images, 0.005, 0), rel=0.02
    )
    assert [RECIPES["adamw"].decay_at(images, step) for step in (-1, 0, 1)] == [0.025, 0.1, 0.4]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_share_is_a_whole_number_of_steps(task):
    for share in SHARES:
        assert task.batch(share) == pytest.approx(share * task.samples)
        size, rest = divmod(task.batch(share), task.merged(share))
        assert rest == 0
        assert task.step / 2 < size <= task.step


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("name", RECIPES)
def test_every_optimizer_fits_every_task(name, task):
    reset()
    fleet.init()
    model, recipe = task.model(), RECIPES[name]
    optimizer = recipe.make(model, 0.01, 0.1)
    fleet.distribute(model, optimizer, recipe.strategy(task, SHARES[0], model, 0.1))


def test_the_text_is_divided_into_blocks_and_can_be_learned():
    split = TASKS["text"].load(Path(), 4800)
    assert len(split.train) == 4800
    assert min(len(split.choose), len(split.test)) > 500
    torch.manual_seed(0)
    model = text.LanguageModel()
    assert sum(p.numel() for p in model.parameters()) < 150_000
    some = split.train[:16]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for _ in range(10):
        loss = TASKS["text"].loss(model, some)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(math.log(97), rel=0.1)
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad():
        total, count = TASKS["text"].score(model, some)
        assert TASKS["text"].shown(total / count) == f"{math.exp(TASKS['text'].loss(model, some).item()):.3f}"


def test_a_character_sees_only_those_before_it():
    model = text.LanguageModel().eval()
    characters = torch.randint(0, 97, (2, text.LENGTH))
    changed = characters.clone()
    changed[:, 40:] = 0
    torch.testing.assert_close(model(characters)[:, :40], model(changed)[:, :40])


# --- the search ------------------------------------------------------------------------------------
def best_at(rate, decay):
    """Scores that are best at these steps from the centre."""

    def score(run):
        recipe = RECIPES[run.optimizer]
        task = TASKS[run.task]
        off = abs(math.log2(run.rate / recipe.rate(task, run.share, rate)))
        return -off - abs(math.log2(run.decay / recipe.decay_at(task, decay)))

    return score


def test_a_best_rate_in_the_middle_ends_the_search_for_it():
    done = played(PLAN, best_at(0, 0))
    assert len(done) == 4 * (3 + 2 + 2), "three rates, two more decays, two more seeds with the best of them"
    best = chosen(PLAN, ("sgd", 0.01), done)
    assert best == PLAN.first(("sgd", 0.01), 0)
    found = [PLAN.at(("sgd", 0.01), best.rate, best.decay, seed) in done for seed in range(4)]
    assert found == [True, True, True, False]


@pytest.mark.parametrize("edge", [2, -2])
def test_a_best_rate_at_an_edge_calls_for_one_beyond_it(edge):
    done = played(PLAN, best_at(edge, 0))
    assert len(done) == 4 * (4 + 2 + 2)
    assert chosen(PLAN, ("lamb", 0.005), done) == PLAN.first(("lamb", 0.005), edge)
    assert all(cell.at_edge for cell in summarised(PLAN, done).cells)


def test_large_batches_also_try_the_short_warm_up():
    plan = replace(PLAN, shares=[0.005, 0.05])
    done = played(plan, lambda run: best_at(0, 1)(run) + (run.warmup is not None))
    assert len(done) == 4 * (3 + 2 + 2) + 2
    for cell in summarised(plan, done).cells:
        assert cell.warmup == 0.1
        assert cell.decay == RECIPES[cell.optimizer].decay_at(TASKS["images"], 1)
        assert len(cell.tests) == 3


def test_another_decay_is_chosen_at_the_best_rate():
    done = played(PLAN, best_at(1, 1))
    for cell in summarised(PLAN, done).cells:
        recipe = RECIPES[cell.optimizer]
        assert cell.rate == recipe.rate(TASKS["images"], cell.share, 1)
        assert cell.decay == recipe.decay_at(TASKS["images"], 1)
        assert len(cell.tests) == 3


# --- what is kept ----------------------------------------------------------------------------------
def test_a_line_that_was_torn_by_a_stop_costs_one_run_and_no_more(tmp_path):
    path = tmp_path / "results.jsonl"
    runs = [PLAN.first(("sgd", 0.005), step) for step in range(3)]
    for run in runs[:2]:
        Kept(path).add(run, outcome(0.5))
    path.write_text(path.read_text()[:-20])
    assert list(Kept(path).outcomes) == runs[:1]
    Kept(path).add(runs[2], outcome(0.5))
    assert list(Kept(path).outcomes) == [runs[0], runs[2]]


# --- what is found ---------------------------------------------------------------------------------
def test_the_largest_share_is_the_last_within_three_tenths_of_a_point():
    tests = {("sgd", 0.005): 0.9, ("sgd", 0.01): 0.89, ("lamb", 0.005): 0.85, ("lamb", 0.01): 0.8971}
    found = summarised(PLAN, played(PLAN, lambda run: tests[run.optimizer, run.share] + 1e-5 * run.seed))
    assert found.baseline.test == pytest.approx(0.90001)
    assert found.largest("sgd").share == 0.005
    assert found.largest("lamb").share == 0.01
    lines = list(report.largest_rows(PLAN, found))
    assert lines[1] == ["baseline: Nesterov SGD", "0.5 %", "90.00%", "", ""]
    assert lines[3][:3] == ["LAMB, within 0.3 points", "1 %", "89.71%"]
    assert "90.00% (90.00% to 90.00%)" in report.as_markdown(list(report.rows(PLAN, found)))


def test_what_was_not_reached_at_the_open_rows_is_said():
    plan = dataclasses.replace(PLAN, shares=[0.005, 0.025, 0.05])
    found = summarised(plan, played(plan, lambda run: 0.9 if run.share < 0.05 else 0.8))
    assert list(report.largest_rows(plan, found))[2][-2:] == ["90.00%", "80.00% (not reached)"]


def test_perplexities_are_compared_with_adamw():
    plan = dataclasses.replace(PLAN, task="text", optimizers=["sgd", "adamw"], samples=4800)
    found = summarised(plan, played(plan, lambda run: -1.5 if run.optimizer == "adamw" else -1.53))
    lines = list(report.largest_rows(plan, found))
    assert lines[1][:3] == ["baseline: AdamW", "0.5 %", "4.482"]
    assert lines[2][:2] == ["Nesterov SGD, within 2 % of the perplexity", "none"]


# --- the page --------------------------------------------------------------------------------------
def reported(folder: Path, runs: Path):
    return CliRunner().invoke(command.main, ["--report", "--runs", str(runs), "--out", str(folder)])


@pytest.fixture
def folder(tmp_path) -> Path:
    """As docs/results: the page and what the first version of the study has left."""
    folder = tmp_path / "results"
    folder.mkdir()
    shutil.copy(ROOT / "docs/results/large_batch.md", folder)
    (folder / "large_batch.json").write_text("{}")
    return folder


def test_without_runs_everything_stays_as_it_is(folder, tmp_path):
    page = (folder / "large_batch.md").read_text()
    out = reported(folder, tmp_path / "runs.jsonl")
    assert out.exit_code == 0, out.output
    assert out.output.strip().endswith("has no runs of this study, so nothing is written")
    assert (folder / "large_batch.md").read_text() == page
    assert sorted(p.name for p in folder.iterdir()) == ["large_batch.json", "large_batch.md"]
    assert (folder / "large_batch.json").read_text() == "{}"


def test_the_tables_of_the_runs_are_put_below_the_marks_of_the_page(folder, tmp_path):
    page = (folder / "large_batch.md").read_text()
    kept = Kept(tmp_path / "runs.jsonl")
    kept.add(command.plan("images", None, None, None, None, None, quick=False).first(("sgd", 0.005), 0), outcome(0.9))
    out = reported(folder, kept.path)
    assert out.exit_code == 0, out.output
    filled = (folder / "large_batch.md").read_text()
    assert filled.startswith(page[: page.index("<!-- table: ")])
    (runs,) = re.findall(r"^\| Fashion-MNIST \| (.+) \|$", filled, re.M)
    (made,) = kept.made.values()
    figures = runs.split(" | ")
    assert figures[0] == "1"
    assert figures[3:] == [f"{made['cpu']}, {made['cores']} cores", made["torch"], made["date"][:10]]
    assert re.search(r"^\| 0.5 % \| 120 \| 2 \| 90.00% \|  \|  \|  \|  \|$", filled, re.M)
    written = json.loads((folder / "large_batch.json").read_text())
    assert (written["date"], written["machine"]["cpu"], written["incomplete"]) == (made["date"], made["cpu"], True)
    reported(folder, kept.path)
    assert json.loads((folder / "large_batch.json").read_text()) == written, "a report adds nothing of its own"
    assert (folder / "large_batch.md").read_text() == filled


# --- the whole -------------------------------------------------------------------------------------
def job(plan: Plan, asked: dict[str, object], minutes: float) -> None:
    fleet.init(is_collective=True)
    worker.study(plan, asked, worker.agreed(time.monotonic()) + 60 * minutes)


def test_a_study_goes_on_where_it_was_stopped(ranks, images, tmp_path):
    results = tmp_path / "results.jsonl"
    asked = {"data": str(images), "results": str(results), "minutes": 0}
    ranks.run(job, TINY, asked, -1)
    assert not results.exists(), "there was no time"
    ranks.run(job, TINY, asked, 5)
    lines = results.read_text().splitlines(keepends=True)
    assert [json.loads(line)["run"]["share"] for line in lines] == [0.005, 0.005, 0.01, 0.01]
    assert [json.loads(line)["outcome"]["updates"] for line in lines] == [4, 4, 2, 2]
    assert all(json.loads(line)["outcome"]["loss"] for line in lines)

    results.write_text("".join(lines[:3]))
    ranks.run(job, TINY, asked, 5)
    again = results.read_text().splitlines(keepends=True)
    assert again[:3] == lines[:3]
    first, second = (json.loads(line)["outcome"] | {"seconds": 0} for line in (lines[3], again[3]))
    assert first == second, "the same run, bit for bit"


def test_the_command_trains_and_reports(images, tmp_path):
    arguments = ["--quick", "--tasks", "images", "--optimizers", "sgd,lamb", "--shares", "0.5", "--epochs", "1"]
    arguments += ["--samples", str(TRAINED), "--data", str(images), "--out", str(tmp_path / "out")]
    made = subprocess.run(
        [sys.executable, "-m", "benchmarks.large_batch", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert "0 runs, 0 min left" in made.stdout
    assert "quick" in made.stdout
    written = json.loads((tmp_path / "out" / "large_batch.json").read_text())
    assert written["quick"] is True
    assert written["incomplete"] is False
    assert [cell["optimizer"] for cell in written["tasks"]["images"]["cells"]] == ["sgd", "lamb"]
    assert {"cpu", "cores", "torch"} <= set(written["machine"])
    assert "| share | batch | updates | Nesterov SGD | LAMB |" in (tmp_path / "out" / "tables.md").read_text()
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "out" / "large_batch.png").read_bytes()[:4] == b"\x89PNG"
    else:
        assert "matplotlib is not installed" in made.stdout


@pytest.mark.parametrize(("option", "value", "words"), [
    ("--shares", "0.5,200", "at most 100 %"),
    ("--shares", "many", "separated by commas"),
    ("--optimizers", "sgd,lion", "unknown optimizer 'lion'"),
    ("--tasks", "sound", "unknown task 'sound'"),
])  # fmt: skip
def test_a_mistake_on_the_command_line_is_a_usage_error(option, value, words):
    out = CliRunner().invoke(command.main, [option, value])
    assert out.exit_code == 2
    assert words in out.output
