"""Every example runs, as its first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
RUN_BELOW = {"digits", "resnet", "bert", "static_style", "pipeline", "slow_network", "auto"}


def fleetrun(*args, cwd, options=()):
    command = [sys.executable, "-m", "fleetx.launch", "--device", "cpu", "--nproc_per_node", "2", *options]
    done = subprocess.run([*command, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def test_each_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == RUN_BELOW | {"prepared"}


@pytest.mark.parametrize("name", sorted(RUN_BELOW - {"static_style"}))
def test_each_says_what_it_takes(name, tmp_path):
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert "fleetrun" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "package"), [("digits", "sklearn"), ("resnet", "sklearn"), ("resnet", "PIL")])
def test_an_example_without_its_extra_says_which_to_install(tmp_path, name, package):
    script = str(EXAMPLES / f"{name}.py")
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(EXAMPLES)!r}); sys.modules[{package!r}] = None; "
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "pip install fleetx[applications]" in done.stderr.splitlines()[-1]


def test_digits_trains_with_two_workers_and_reports_its_accuracy(tmp_path):
    said = fleetrun(EXAMPLES / "digits.py", "--epochs", 2, cwd=tmp_path)
    assert "requested: clip, gradient_merge, recompute, sync_batch_norm" in said
    found = numbers(r"test accuracy (\S+)%", said)
    assert len(found) == 2
    assert found[-1] > 85


@pytest.mark.nightly
def test_digits_takes_a_strategy_from_a_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("amp: {dtype: bfloat16}\n")
    said = fleetrun(EXAMPLES / "digits.py", "--epochs", 1, "--strategy", "mine.yaml", cwd=tmp_path)
    assert "requested: amp\n" in said


@pytest.mark.nightly
def test_resnet_learns_pictures(tmp_path):
    said = fleetrun(EXAMPLES / "resnet.py", "--epochs", 4, cwd=tmp_path)
    found = numbers(r"acc1: ([\d.]+)", said)
    assert len(found) == 4
    assert found[-1] > 0.7


@pytest.mark.nightly
def test_bert_learns_words_and_goes_on_later(tmp_path):
    found = numbers(r"masked words ([\d.]+)", fleetrun(EXAMPLES / "bert.py", "--steps", 80, cwd=tmp_path))
    assert found[-1] < found[0] - 0.3
    said = fleetrun(EXAMPLES / "bert.py", "--steps", 20, cwd=tmp_path)
    assert "resuming at epoch" in said
    assert numbers(r"masked words ([\d.]+)", said)[0] < found[0] - 0.3


@pytest.mark.nightly
def test_the_static_style(tmp_path):
    said = fleetrun(EXAMPLES / "static_style.py", cwd=tmp_path, options=["--paddle-api", "fleetx"])
    found = numbers(r"epoch \d+: loss ([\d.]+)", said)
    assert found[-1] < 0.6 * found[0]


@pytest.mark.parametrize("options", [[], pytest.param(["--balanced"], marks=pytest.mark.nightly)])
def test_a_pipeline_of_two_workers(tmp_path, options):
    said = fleetrun(EXAMPLES / "pipeline.py", "--steps", 30, *options, cwd=tmp_path)
    assert "stages begin with" in said
    found = numbers(r"step \d+: loss ([\d.]+)", said)
    assert found[-1] < found[0]
    assert "worker 0 holds" in said


def test_the_slow_network_sends_less(tmp_path):
    said = fleetrun(EXAMPLES / "slow_network.py", "--epochs", 6, cwd=tmp_path)
    found = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.endswith("%")}
    sent = {name: float(values[0]) for name, values in found.items()}
    assert set(sent) == {"plain", "fp16_allreduce", "dgc", "localsgd", "adaptive_localsgd", "merged"}
    assert sent["dgc"] < 0.5 * sent["plain"]
    assert sent["localsgd"] < 0.3 * sent["plain"]
    assert sent["merged"] < 0.4 * sent["plain"]
    assert all(float(values[1].rstrip("%")) > 85 for values in found.values())


@pytest.mark.nightly
def test_auto_chooses_and_the_file_repeats_it(tmp_path):
    said = fleetrun(EXAMPLES / "auto.py", "--epochs", 3, cwd=tmp_path)
    assert "plans predicted" in said
    losses = numbers(r"loss ([\d.]+)", said)
    assert losses[-1] < losses[0]
    repeated = fleetrun(EXAMPLES / "auto.py", "--epochs", 3, "--strategy", "strategy.yaml", cwd=tmp_path)
    assert numbers(r"loss ([\d.]+)", repeated) == losses
