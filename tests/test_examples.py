"""Every example runs, as its first lines say.

Nightly, fleetrun starts them all, for as long as they need to learn. A short run, mostly in the pool of ranks, is in
`make test`: torch is imported already there.
"""

from __future__ import annotations

import importlib
import io
import re
import sys
import warnings
from contextlib import chdir, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
from PIL import Image

import forked_command
from fleetx.comm import kernel
from fleetx.comm.session import current
from fleetx.record.read import read
from fleetx.report import page

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
RUN_BELOW = {
    "digits", "resnet", "bert", "static_style", "pipeline", "slow_network", "auto", "image_folder", "language_model",
    "finetune",
}  # fmt: skip


def fleetrun(*args, cwd, options=()):
    done = forked_command.fleetrun(["--device", "cpu", "--nproc_per_node", "2", *options, *args], cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_ranks(ranks, name, *args, cwd, **replaced):
    """Run an example in every rank of the pool, with other functions if need be. Returns what they printed."""
    return "".join(ranks.run(printed, name, list(map(str, args)), str(cwd), replaced))


def printed(*example):
    with redirect_stdout(io.StringIO()) as text, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the schedule resumes with changed settings")  # more epochs than before
        call(*example)
    return text.getvalue()


def call(name, args, cwd, replaced):
    argv, path = [name, *args], [str(EXAMPLES), *sys.path]
    with chdir(cwd), patch.object(sys, "path", path), patch.object(sys, "argv", argv):
        example = importlib.import_module(name)  # a module that can be found: torch.compile looks for it
        vars(example).update(replaced)
        try:
            example.main()
        finally:
            del sys.modules[name]
            current().stop_recording()  # as at the end of a script


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def test_each_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == RUN_BELOW | {"prepared"}


def test_each_example_has_a_line_in_the_docs():
    text = (ROOT / "docs" / "examples.md").read_text()
    assert set(re.findall(r"\(\.\./examples/(\w+)\.py\)", text)) == RUN_BELOW


@pytest.mark.parametrize("name", sorted(RUN_BELOW - {"static_style"}))
def test_each_says_what_it_takes(name, tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        call(name, ["--help"], tmp_path, {})
    assert "fleetrun" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "package"), [("digits", "sklearn"), ("resnet", "sklearn"), ("resnet", "PIL"), ("finetune", "transformers")]
)
def test_an_example_without_its_extra_says_which_to_install(tmp_path, name, package):
    script = str(EXAMPLES / f"{name}.py")
    (tmp_path / "without.py").write_text(
        f"import runpy, sys; sys.path.insert(0, {str(EXAMPLES)!r}); "
        f"imported = [name for name in sys.modules if name.startswith({package + '.'!r})]\n"  # what this is a fork of
        f"sys.modules |= dict.fromkeys([{package!r}, *imported])\n"
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    done = forked_command.python(["without.py"], cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'fleetx[applications]'" in done.stderr.splitlines()[-1]


def test_digits_trains_with_two_workers_and_reports_its_accuracy(ranks, tmp_path):
    """As `make train` runs it, which goes on when it is run again."""
    options = ["--checkpoints", "run", "--record", "runs/digits"]
    check_digits(in_ranks(ranks, "digits", "--epochs", 1, *options, cwd=tmp_path))
    said = in_ranks(ranks, "digits", "--epochs", 2, *options, cwd=tmp_path)
    assert "resumed after step 23 of 46" in said
    assert re.findall(r"epoch +(\d+)", said) == ["2"]
    record = read(tmp_path / "runs/digits")
    assert record.plans[0]["predicted"] > 0
    assert "resumed" in [event["what"] for event in record.events]
    assert len(record.values) == 2
    assert 'data-plot="loss"' in page.page([record])


@pytest.mark.nightly
def test_digits_under_fleetrun(tmp_path):
    check_digits(fleetrun(EXAMPLES / "digits.py", "--epochs", 1, cwd=tmp_path))


def check_digits(said):
    assert "requested: clip, gradient_merge, recompute, sync_batch_norm" in said
    assert numbers(r"test accuracy (\S+)%", said)[0] > 80


@pytest.mark.nightly
def test_digits_takes_a_strategy_from_a_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("amp: {dtype: bfloat16}\n")
    said = fleetrun(EXAMPLES / "digits.py", "--epochs", 1, "--strategy", "mine.yaml", cwd=tmp_path)
    assert "requested: amp\n" in said


def some_listed_images(folder):
    for phase, count in (("train", 16), ("val", 4)):
        (folder / phase).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (40, 40), (100 * (i % 2), 10 * i, 0)).save(folder / phase / f"{i}.jpg")
        (folder / f"{phase}.txt").write_text("".join(f"{i}.jpg {i % 2}\n" for i in range(count)))
    return ["--data", folder, "--batch", 2, "--classes", 2, "--hidden", 4]


def test_resnet_trains_on_one_s_own_pictures(ranks, tmp_path):
    said = in_ranks(ranks, "resnet", *some_listed_images(tmp_path / "mine"), "--epochs", 2, cwd=tmp_path)
    assert set(numbers(r"epoch id: (\d+), loss: [\d.]+, acc1: ", said)) == {0, 1}  # on each rank


@pytest.mark.nightly
def test_resnet_learns_pictures(tmp_path):
    said = fleetrun(EXAMPLES / "resnet.py", "--epochs", 4, cwd=tmp_path)
    found = numbers(r"acc1: ([\d.]+)", said)
    assert len(found) == 4
    assert found[-1] > 0.7


def test_bert_goes_on_later(ranks, tmp_path):
    options = ["--steps", 20, "--batch", 4]
    (first,) = numbers(r"masked words ([\d.]+)", in_ranks(ranks, "bert", *options, cwd=tmp_path))
    said = in_ranks(ranks, "bert", *options, cwd=tmp_path)
    assert "resuming at epoch 0, sample 160" in said
    assert numbers(r"masked words ([\d.]+)", said)[0] < first


@pytest.mark.nightly
def test_bert_learns_words_and_goes_on_later(tmp_path):
    found = numbers(r"masked words ([\d.]+)", fleetrun(EXAMPLES / "bert.py", "--steps", 80, cwd=tmp_path))
    assert found[-1] < found[0] - 0.3
    said = fleetrun(EXAMPLES / "bert.py", "--steps", 20, cwd=tmp_path)
    assert "resuming at epoch" in said
    assert numbers(r"masked words ([\d.]+)", said)[0] < found[0] - 0.3


def test_an_epoch_in_the_static_style(tmp_path):
    for name in ("static_style", "prepared"):
        text = (EXAMPLES / f"{name}.py").read_text()
        (tmp_path / f"{name}.py").write_text(text.replace("EPOCHS = 8", "EPOCHS = 1"))
    said = fleetrun("static_style.py", cwd=tmp_path, options=["--paddle-api", "fleetx"])
    assert len(numbers(r"epoch \d+: loss ([\d.]+)", said)) == 1


@pytest.mark.nightly
def test_the_static_style(tmp_path):
    said = fleetrun(EXAMPLES / "static_style.py", cwd=tmp_path, options=["--paddle-api", "fleetx"])
    found = numbers(r"epoch \d+: loss ([\d.]+)", said)
    assert found[-1] < 0.6 * found[0]


def test_a_pipeline_of_two_workers(ranks, tmp_path):
    check_pipeline(in_ranks(ranks, "pipeline", "--steps", 10, "--batch", 8, cwd=tmp_path))


@pytest.mark.nightly
def test_a_balanced_pipeline_of_two_workers(tmp_path):
    check_pipeline(fleetrun(EXAMPLES / "pipeline.py", "--steps", 30, "--balanced", cwd=tmp_path))


def check_pipeline(said):
    assert "stages begin with" in said
    found = numbers(r"step \d+: loss ([\d.]+)", said)
    assert found[-1] < found[0]
    assert "worker 0 holds" in said


def bytes_sent():
    """By this rank. Its connections stay open as long as the pool."""
    return sum(kernel.bytes_sent().values())


def test_the_slow_network_sends_less(ranks, tmp_path):
    check_bytes(in_ranks(ranks, "slow_network", "--epochs", 3, cwd=tmp_path, loopback_bytes=bytes_sent), accuracy=70)


@pytest.mark.nightly
def test_the_slow_network_counts_the_bytes_of_the_loopback_interface(tmp_path):
    check_bytes(fleetrun(EXAMPLES / "slow_network.py", cwd=tmp_path), accuracy=85)


def check_bytes(said, accuracy):
    found = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.endswith("%")}
    sent = {name: float(values[0]) for name, values in found.items()}
    assert set(sent) == {"plain", "fp16_allreduce", "dgc", "localsgd", "adaptive_localsgd", "merged"}
    assert sent["dgc"] < 0.5 * sent["plain"]
    assert sent["localsgd"] < 0.3 * sent["plain"]
    assert sent["merged"] < 0.4 * sent["plain"]
    assert all(float(values[1].rstrip("%")) > accuracy for values in found.values())


def test_auto_chooses_and_the_file_repeats_it(ranks, tmp_path):
    check_auto(lambda *args: in_ranks(ranks, "auto", "--epochs", 2, *args, cwd=tmp_path))


@pytest.mark.nightly
def test_auto_under_fleetrun(tmp_path):
    check_auto(lambda *args: fleetrun(EXAMPLES / "auto.py", "--epochs", 3, *args, cwd=tmp_path))


def check_auto(run):
    said = run()
    assert "plans predicted" in said
    losses = numbers(r"loss ([\d.]+)", said)
    assert losses[-1] < losses[0]
    assert numbers(r"loss ([\d.]+)", run("--strategy", "strategy.yaml")) == losses


def some_images(folder):
    """Dark and bright ones."""
    for phase, count in (("train", 24), ("val", 8)):
        for name, level in (("bright", 200), ("dark", 50)):
            (folder / phase / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (16, 16), (level + i, level, level)).save(folder / phase / name / f"{i}.png")
    return ["--data", folder, "--size", 16, "--batch", 4]


def some_text(folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("to be or not to be, that is the question. " * 40)
    return ["--data", folder, "--length", 16, "--width", 32, "--layers", 1]


def some_sentences(folder):
    folder.mkdir()
    for phase, count in (("train", 24), ("val", 8)):
        lines = [f"good\tI like number {i}\nbad\tnumber {i} is dull\n" for i in range(count)]
        (folder / f"{phase}.tsv").write_text("".join(lines))
    return ["--data", folder, "--batch", 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "found"),
    [
        ("image_folder", some_images, r"epoch (\d): accuracy"),
        ("language_model", some_text, r"epoch (\d): [\d.]+ bits per byte"),
        ("finetune", some_sentences, r"epoch (\d): accuracy"),
    ],
)
def test_one_s_own_data_are_trained_on_resumed_and_reported(ranks, tmp_path, name, make, found):
    options = [*make(tmp_path / "mine"), "--output", "out"]
    said = in_ranks(ranks, name, *options, "--epochs", 1, cwd=tmp_path)
    assert numbers(found, said) == [1]
    assert "resumed" not in said
    said = in_ranks(ranks, name, *options, "--epochs", 2, cwd=tmp_path)
    assert numbers(found, said) == [2]
    assert "resumed after step" in said
    record = read(tmp_path / "out")
    assert [event["what"] for event in record.events if not event["rank"]] == [
        "checkpoint", "end", "resumed", "checkpoint", "end"
    ]  # fmt: skip
    assert {line["round"] for line in record.rounds} == set(range(1, record.rounds[-1]["round"] + 1))
    assert len(record.values) == 2
    assert record.plans[0]["predicted"] > 0
    assert 'data-plot="loss"' in page.page([record])
    assert (tmp_path / "out" / "model" / "model.safetensors").stat().st_size > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "found", "least"),
    [("image_folder", r"accuracy ([\d.]+)%", 90), ("finetune", r"accuracy ([\d.]+)%", 70)],
)
def test_the_command_of_its_first_lines_learns(tmp_path, name, found, least):
    assert numbers(found, fleetrun(EXAMPLES / f"{name}.py", cwd=tmp_path))[-1] > least


@pytest.mark.nightly
def test_the_language_model_learns(tmp_path):
    (found,) = numbers(r"([\d.]+) bits per byte", fleetrun(EXAMPLES / "language_model.py", "--epochs", 1, cwd=tmp_path))
    assert found < 4.2  # the entropy of its single bytes is 4.7
