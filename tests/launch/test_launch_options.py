"""What fleetrun accepts, what it refuses, and that it says so at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from launching import PACKAGES, launch

from fleetx.errors import LaunchError
from fleetx.launch import devices
from fleetx.launch.help import REFUSED
from fleetx.launch.nodes import rank_among
from fleetx.launch.options import parse

NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('never')\n")
    return tmp_path


def refusal(words: str) -> str:
    with pytest.raises(LaunchError) as caught:
        parse(words.split(), given=NO_GPUS)
    return str(caught.value)


def test_help_answers_without_torch_and_names_what_matters(tmp_path):
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fleetx.launch", "--help"],
        env={**os.environ, "PYTHONPATH": PACKAGES},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert run.returncode == 0
    imported = set(re.findall(r"\| +([\w.]+)$", run.stderr, re.MULTILINE))
    assert "click" in imported
    assert not imported & {"torch", "numpy", "pydantic", "psutil"}
    for word in ("--gpus", "--nproc_per_node", "--ips", "--log_dir", "workerlog.N", "Examples", "PADDLE_TRAINER_ID"):
        assert word in run.stdout


def test_every_refusal_is_one_line_with_exit_code_2_and_starts_nothing(tmp_path):
    run = launch(tmp_path, ["missing.py"]).finish()
    assert run.code == 2
    assert run.out == ""
    assert re.fullmatch(r"fleetrun: no script missing.py in .*\n", run.err)
    assert not (tmp_path / "log").exists()
    assert "No module named" not in run.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "Missing argument"),
        ("nothing.py", "no script nothing.py in"),
        ("os.path", r"no script os.path in .* fleetrun -m os.path"),
        (".", "is a directory"),
        ("--nproc_per_node -1 train.py", "-1 is not in the range"),
        ("--nproc_per_node 0 train.py", "0 is not in the range"),
        ("--nproc_per_node two train.py", "'two' is not a valid integer"),
        ("--max_restarts -1 train.py", "-1 is not in the range"),
        ("--gpus 0,1 --nproc_per_node 4 train.py", "--nproc_per_node 4 does not match the 2 of --gpus 0,1"),
        ("--gpus 0,1 train.py", "no GPU.*same 2 workers on the CPU, add --device cpu or set FLEETX_DEVICE=cpu"),
        ("--device cuda train.py", "no GPU.*--device cpu"),
        ("--device tpu train.py", "'tpu' is not one of"),
        ("--device cpu --gpus 0,0 train.py", "0 is there twice"),
        ("--device cpu --gpus 0,,1 train.py", "expected a list"),
        ("--device cpu --gpus -1 train.py", "-1 is not the number of a GPU"),
        ("--device cpu --gpus a train.py", "a is not the number of a GPU"),
        ("--gpu 0 train.py", "no option --gpu; did you mean --gpus?"),
        ("--zzz train.py", "no option --zzz; see fleetrun --help"),
        ("--rank 0 train.py", "--rank needs --nnodes"),
        ("--master a:1 train.py", "--master needs --nnodes"),
        ("--nnodes 2 train.py", "needs --master and --rank"),
        ("--nnodes 2 --rank 2 --master a:1 train.py", "the last has rank 1"),
        ("--nnodes 2 --rank 0 --master a train.py", "expected HOST:PORT"),
        ("--nnodes 2 --rank 0 --master a:70000 train.py", "expected HOST:PORT"),
        ("--nnodes 2 --rank 0 --master :80 train.py", "expected HOST:PORT"),
        ("--ips 10.0.0.1,10.0.0.1 train.py", "10.0.0.1 is there twice"),
        ("--ips 127.0.0.1,10.9.9.9 --nnodes 3 train.py", "--nnodes 3 does not match the 2 of --ips"),
        ("--ips 198.51.100.1,198.51.100.2 train.py", "none of them is an address of this machine .*127.0.0.1.*--rank"),
        ("--ips 127.0.0.1,127.0.0.2 train.py", "127.0.0.1, 127.0.0.2 are all this machine; .*--rank"),
        ("--servers a:1,b:2 train.py", "--servers: fleetx has no parameter servers"),
        ("--elastic_server=h:1 train.py", "the number of nodes is fixed"),
        ("--rdzv-endpoint h:1 train.py", "the nodes meet at --master"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(script, words, says):
    message = refusal(words)
    assert re.search(says, message)
    assert "\n" not in message


def test_a_log_dir_that_cannot_be_written_is_refused(script):
    (script / "file").write_text("")
    for directory in ("file", "file/below", "/proc/nothing"):
        run = launch(script, ["--device", "cpu", "--log_dir", directory, "train.py"]).finish()
        assert run.code == 2
        assert re.fullmatch(rf"fleetrun: --log_dir {directory}: cannot write there \(.+\)\n", run.err)


def test_a_wrong_variable_is_refused_by_its_name(script, monkeypatch):
    with pytest.raises(LaunchError, match="FLEETX_DEVICE=tpu is neither cpu nor cuda"):
        parse(["train.py"], given={"FLEETX_DEVICE": "tpu"})
    monkeypatch.setenv("FLAGS_START_PORT", "many")
    with pytest.raises(LaunchError, match="FLAGS_START_PORT=many is not a port"):
        parse(["train.py"], given={})


def test_the_options_of_its_relatives_are_refused_with_a_reason(script):
    for name, reason in REFUSED.items():
        assert refusal(f"--{name} 1 train.py") == f"--{name}: {reason}"


def test_dashes_underscores_and_older_names_mean_the_same(script):
    for words in ("--nproc_per_node 3 --log_dir x --max_restarts 2", "--nproc-per-node=3 --log-dir=x --max_restart 2"):
        job = parse(["--device", "cpu", *words.split(), "train.py"], given={})
        assert (job.workers, str(job.log_dir), job.max_restarts) == (3, "x", 2)
    assert parse(["--device", "cpu", "--selected_gpus", "0,1", "train.py"], given={}).workers == 2


def test_the_arguments_of_the_script_are_not_ours(script):
    words = ["--gpus", "9", "--help", "--", "-m", "--nproc_per_node=4", ""]
    job = parse(["--device", "cpu", "train.py", *words], given={})
    assert job.arguments == tuple(words)
    assert job.workers == 1


def test_the_device_is_the_option_then_the_variable_then_what_there_is(script):
    assert parse(["train.py"], given=NO_GPUS).device == "cpu"
    assert parse(["--gpus", "0,1", "train.py"], given={"FLEETX_DEVICE": "cpu"}).workers == 2
    assert devices.device_of("cpu", gpus=None, visible=["0"], given={"FLEETX_DEVICE": "cuda"}) == "cpu"
    assert devices.device_of(None, gpus=None, visible=["0"], given={"FLEETX_DEVICE": "cpu"}) == "cpu"
    assert devices.device_of(None, gpus=None, visible=["0"], given={}) == "cuda"


def test_gpus_are_the_ones_that_exist_and_are_visible():
    def chosen(gpus, *, nproc=None, installed=4, **given):
        visible = devices.visible_gpus(installed=installed, given=given)
        return devices.gpus_of(gpus, nproc=nproc, visible=visible, given=given)

    assert chosen(None) == ["0", "1", "2", "3"]
    assert chosen(None, nproc=2) == ["0", "1"]
    assert chosen(["3", "1"]) == ["3", "1"]
    assert chosen(None, CUDA_VISIBLE_DEVICES="2,3") == ["2", "3"]
    assert chosen(["3"], CUDA_VISIBLE_DEVICES="2,3") == ["3"]
    assert chosen(None, CUDA_VISIBLE_DEVICES="GPU-12ab,MIG-7") == ["GPU-12ab", "MIG-7"]
    assert chosen(None, CUDA_VISIBLE_DEVICES="1,9,2") == ["1"]
    with pytest.raises(LaunchError, match="--gpus 0,4: no GPU 4; there are 0,1,2,3"):
        chosen(["0", "4"])
    with pytest.raises(LaunchError, match="no GPU 0; there are 2,3 in CUDA_VISIBLE_DEVICES"):
        chosen(["0"], CUDA_VISIBLE_DEVICES="2,3")
    with pytest.raises(LaunchError, match="--nproc_per_node 5: there are only 4 GPUs"):
        chosen(None, nproc=5)


def test_a_node_finds_itself_among_the_ips():
    assert rank_among(["198.51.100.1", "127.0.0.1", "198.51.100.2"]) == 1
    assert rank_among(["198.51.100.1", "localhost"]) == 1
