"""Which command lines fleetrun accepts, and the errors for the others."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from launching import PACKAGES

import fleetx
from fleetx.errors import LaunchError
from fleetx.launch import devices
from fleetx.launch.help import UNSUPPORTED
from fleetx.launch.nodes import _resolve, rank_in
from fleetx.launch.options import OPTIONS, main, parse

NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('never')\n")
    return tmp_path


def error_of(words: str) -> str:
    with pytest.raises(LaunchError) as caught:
        parse(words.split(), environ=NO_GPUS)
    return str(caught.value)


def test_help_does_not_import_torch(tmp_path):
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


def test_a_wrong_command_line_has_exit_code_2_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["missing.py"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"fleetrun: script missing.py does not exist in .*\n", printed.err)
    assert not (tmp_path / "log").exists()
    (tmp_path / "first.py").touch()
    assert main(["frist.py"]) == 2
    assert "frist.py does not exist in" in (said := capsys.readouterr().err)
    assert "did you mean 'first.py'?" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "Missing argument"),
        ("nothing.py", "script nothing.py does not exist in"),
        ("os.path", r"script os.path does not exist in .*; to run a module: fleetrun -m os.path"),
        (".", "is a directory"),
        ("--nproc_per_node -1 train.py", "-1 is not in the range"),
        ("--nproc_per_node 0 train.py", "0 is not in the range"),
        ("--nproc_per_node 5000 train.py", "5000 is not in the range"),
        ("--nproc_per_node two train.py", "'two' is not a valid integer"),
        ("--max_restarts -1 train.py", "-1 is not in the range"),
        ("--gpus 0,1 --nproc_per_node 4 train.py", "--nproc_per_node 4 does not match --gpus 0,1, which lists 2"),
        ("--gpus 0,1 train.py", "no GPU.*same 2 workers on the CPU, add --device cpu or set FLEETX_DEVICE=cpu"),
        ("--device cuda train.py", "no GPU.*--device cpu"),
        ("--device tpu train.py", "'tpu' is not one of"),
        ("--device cpu --gpus 0,0 train.py", "0 is listed more than once"),
        ("--device cpu --gpus 0,,1 train.py", "must be a comma-separated list such as 0,1"),
        ("--device cpu --gpus -1 train.py", "-1 is not a GPU index"),
        ("--device cpu --gpus a train.py", "a is not a GPU index"),
        ("--gpu 0 train.py", "unknown option --gpu; did you mean --gpus?"),
        ("--zzz train.py", "unknown option --zzz; see fleetrun --help"),
        ("--rank 0 train.py", "--rank is for several nodes and requires --nnodes or --ips"),
        ("--master a:1 train.py", "--master is for several nodes and requires --nnodes or --ips"),
        ("--nnodes 2 train.py", "requires --master and --rank"),
        ("--nnodes 2 --rank 2 --master a:1 train.py", "must be less than the number of nodes, 2"),
        ("--nnodes 2 --rank 0 --master a train.py", "must be HOST:PORT"),
        ("--nnodes 2 --rank 0 --master a:70000 train.py", "must be HOST:PORT"),
        ("--nnodes 2 --rank 0 --master :80 train.py", "must be HOST:PORT"),
        ("--nnodes 2 --rank 0 --master a..b:80 train.py", "'a..b' cannot be the name of a host"),
        (f"--nnodes 2 --rank 0 --master {'a' * 64}:80 train.py", "cannot be the name of a host"),
        ("--ips 10.0.0.1,10.0.0.1 train.py", "10.0.0.1 is listed more than once"),
        (
            "--ips 127.0.0.1,10.9.9.9 --nnodes 3 train.py",
            "--nnodes 3 does not match --ips .*, which lists 2",
        ),
        ("--ips 198.51.100.1,198.51.100.2 train.py", "none of these is an address of this machine .*127.0.0.1.*--rank"),
        ("--ips 127.0.0.1,127.0.0.2 train.py", "127.0.0.1, 127.0.0.2 are all addresses of this machine; .*--rank"),
        ("--servers a:1,b:2 train.py", "--servers: fleetx has no parameter servers"),
        ("--elastic_server=h:1 train.py", "use --elastic MIN:MAX for a number of workers or nodes that changes"),
        ("--elastic 2 --max_restarts 1 train.py", "--elastic 2: must be MIN:MAX, such as 2:4"),
        ("--elastic 2:2 --max_restarts 1 train.py", "MIN must be at least 1 and less than MAX"),
        ("--elastic 0:2 --max_restarts 1 train.py", "MIN must be at least 1 and less than MAX"),
        ("--elastic 1:2 train.py", "on one node requires --max_restarts"),
        ("--elastic 1:2 --nproc_per_node 3 --max_restarts 1 train.py", "does not match 3 workers"),
        ("--elastic 1:2 --ips 127.0.0.1,10.9.9.9,10.9.9.8 train.py", "--elastic 1:2 does not match 3 nodes"),
        ("--elastic 1:2 --master a:1 --rank 0 train.py", "requires a job secret: set FLEETX_JOB_SECRET"),
        ("--nnodes 1 --secret_file missing train.py", r"--secret_file missing: cannot be read \(No such file or dir"),
        ("--secret_file s train.py", "--secret_file is for several nodes and requires --nnodes or --ips"),
        ("--join_timeout 5 train.py", "--join_timeout is for several nodes and requires --nnodes or --ips"),
        ("--regrow_after 5 train.py", "--regrow_after is for --elastic on one node"),
        (
            "--elastic 1:2 --nnodes 2 --master a:1 --rank 0 --regrow_after 5 train.py",
            "--elastic on several nodes|--regrow",
        ),
        ("--preload x train.py", "--preload is for restarts and requires --max_restarts or --elastic"),
        ("--cold train.py", "--cold is for restarts and requires --max_restarts or --elastic"),
        ("--restart_delay 0 train.py", "--restart_delay is for restarts"),
        ("--max_restarts 1 --cold --preload x train.py", "--preload and --cold contradict each other"),
        ("--restart_delay 61 train.py", "61 is not in the range"),
        ("--rdzv-endpoint h:1 train.py", "--rdzv_endpoint: use --master HOST:PORT"),
    ],
)
def test_a_wrong_command_line_is_a_one_line_error(script, words, message):
    error = error_of(words)
    assert re.search(message, error)
    assert "\n" not in error


def test_a_log_dir_that_cannot_be_written_is_an_error(script, capsys):
    (script / "file").write_text("")
    for directory in ("file", "file/below", "/proc/nothing"):
        assert main(["--device", "cpu", "--log_dir", directory, "train.py"]) == 2
        expected = rf"fleetrun: --log_dir {directory}: cannot write there \(.+\)\n"
        assert re.fullmatch(expected, capsys.readouterr().err)


def test_a_wrong_variable_is_an_error(script, monkeypatch):
    with pytest.raises(LaunchError, match="FLEETX_DEVICE=tpu: must be cpu or cuda"):
        parse(["train.py"], environ={"FLEETX_DEVICE": "tpu"})
    monkeypatch.setenv("FLAGS_START_PORT", "many")
    with pytest.raises(LaunchError, match="FLAGS_START_PORT=many: must be a port"):
        parse(["train.py"], environ={})


def test_an_unsupported_option_of_another_launcher_is_explained(script):
    for name, reason in UNSUPPORTED.items():
        assert error_of(f"--{name} 1 train.py") == f"--{name}: {reason}"


def test_dashes_underscores_and_older_names_mean_the_same(script):
    for words in ("--nproc_per_node 3 --log_dir x --max_restarts 2", "--nproc-per-node=3 --log-dir=x --max_restart 2"):
        job = parse(["--device", "cpu", *words.split(), "train.py"], environ={})
        assert (job.workers, str(job.log_dir), job.max_restarts) == (3, "x", 2)
    assert parse(["--device", "cpu", "--selected_gpus", "0,1", "train.py"], environ={}).workers == 2


def test_options_after_the_script_belong_to_the_script(script):
    words = ["--gpus", "9", "--help", "--", "-m", "--nproc_per_node=4", ""]
    job = parse(["--device", "cpu", "train.py", *words], environ={})
    assert job.arguments == tuple(words)
    assert job.workers == 1


def test_the_device_is_the_option_then_the_variable_then_what_is_available(script):
    assert parse(["train.py"], environ=NO_GPUS).device == "cpu"
    assert parse(["--gpus", "0,1", "train.py"], environ={"FLEETX_DEVICE": "cpu"}).workers == 2
    assert devices.device_of("cpu", gpus=None, visible=["0"], environ={"FLEETX_DEVICE": "cuda"}) == "cpu"
    assert devices.device_of(None, gpus=None, visible=["0"], environ={"FLEETX_DEVICE": "cpu"}) == "cpu"
    assert devices.device_of(None, gpus=None, visible=["0"], environ={}) == "cuda"


def test_gpus_are_the_ones_that_exist_and_are_visible():
    def chosen(gpus, *, nproc=None, installed=4, **environ):
        visible = devices.visible_gpus(installed=installed, environ=environ)
        return devices.gpus_of(gpus, nproc=nproc, visible=visible, environ=environ)

    assert chosen(None) == ["0", "1", "2", "3"]
    assert chosen(None, nproc=2) == ["0", "1"]
    assert chosen(["3", "1"]) == ["3", "1"]
    assert chosen(None, CUDA_VISIBLE_DEVICES="2,3") == ["2", "3"]
    assert chosen(["3"], CUDA_VISIBLE_DEVICES="2,3") == ["3"]
    assert chosen(None, CUDA_VISIBLE_DEVICES="GPU-12ab,MIG-7") == ["GPU-12ab", "MIG-7"]
    assert chosen(None, CUDA_VISIBLE_DEVICES="1,9,2") == ["1"]
    with pytest.raises(LaunchError, match="--gpus 0,4: GPU 4 does not exist; this machine has 0,1,2,3"):
        chosen(["0", "4"])
    with pytest.raises(LaunchError, match="GPU 0 does not exist; CUDA_VISIBLE_DEVICES has 2,3"):
        chosen(["0"], CUDA_VISIBLE_DEVICES="2,3")
    with pytest.raises(LaunchError, match="--nproc_per_node 5: only 4 GPUs are available"):
        chosen(None, nproc=5)


def test_a_node_finds_itself_in_ips():
    assert rank_in(["198.51.100.1", "127.0.0.1", "198.51.100.2"]) == 1
    assert rank_in(["198.51.100.1", "localhost"]) == 1


def test_the_version_is_printed(capsys):
    assert parse(["--version"], environ={}) is None
    assert capsys.readouterr().out == f"fleetrun, version {fleetx.__version__}\n"


WORDS = st.sampled_from(
    [option for options in OPTIONS.values() for each in options for option in each.opts]
    + ["train.py", "-m", "--", "0", "1", "-1", "2:4", "1:0", "4:2:1", ":", "a,b", ",", "", "127.0.0.1:1", "[::1]:99999"]
    + [
        "localhost:6069",
        "\x00",
        "é\u2028",
        "9" * 30,
        "²:³",
        "1e9",
        "nan",
        "inf",
        "cpu",
        "cuda",
        "--elastic=1:2",
        "GPU-x",
    ]
)


@given(st.lists(WORDS | st.text(max_size=5), max_size=8))
@example(["\n"])
@example(["--gpus", "a\nb", "train.py"])
@example(["--elastic", "1\n", "train.py"])
@example(["--master", "\n", "train.py"])
@example(["--a\nb"])
def test_any_command_line_gives_a_job_or_a_one_line_error(words):
    # Without the network: the names of hosts are nonsense here, and a name server may take its time.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetx.launch.nodes._resolve", lambda host: {"127.0.0.1"})
        outcome = outcome_of(words)
    assert outcome == ""


def test_a_host_that_is_no_name_does_not_resolve():
    assert _resolve("a\x00b") == _resolve("a..b") == _resolve("a" * 64) == set()


def outcome_of(words):
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        Path("train.py").touch()
        try:
            job = parse(words, environ=NO_GPUS)
            outcome = "" if job is None or 1 <= job.workers <= 4096 else "a job that cannot be run"
        except LaunchError as error:
            outcome = str(error).partition("\n")[1]
        assert os.listdir() == ["train.py"]
        return outcome


def test_the_secret_is_not_shown_with_the_job(script):
    words = "--device cpu --nnodes 2 --rank 0 --master 127.0.0.1:1 train.py"
    job = parse(words.split(), environ={"FLEETX_JOB_SECRET": "0123456789abcdef"})
    assert job.secret == b"0123456789abcdef"
    assert "0123456789abcdef" not in repr(job) + str(job)


def test_paddles_older_options_are_understood(script, monkeypatch):
    monkeypatch.setenv("FLAGS_START_PORT", "7000")
    words = (
        "--device cpu --cluster_node_ips 10.0.0.1,10.0.0.2 --node_ip 10.0.0.2 --started_port 7100 --run_mode collective"
    )
    job = parse([*words.split(), "train.py"], environ={})
    assert (job.nodes, job.rank, job.address, job.master) == (2, 1, "10.0.0.2", ("10.0.0.1", 7099))
    with pytest.raises(LaunchError, match=r"--node_ip 10\.0\.0\.3 is not one of --ips 10\.0\.0\.1"):
        parse(["--ips", "10.0.0.1", "--node_ip", "10.0.0.3", "train.py"], environ={})
    with pytest.raises(LaunchError, match="--run_mode"):
        parse(["--run_mode", "ps", "train.py"], environ={})
