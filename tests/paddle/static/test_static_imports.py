"""`import paddle`: what it gives, what is said where something is not covered, and who decides."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types

import pytest
from static_runs import PACKAGES, uninstall

import fleetx
from fleetx import UsageError
from fleetx.errors import LaunchError
from fleetx.launch import environment, runner
from fleetx.launch.job import Attempt
from fleetx.launch.options import parse
from fleetx.paddle import api as home
from fleetx.paddle.static import imports, install


@pytest.fixture
def installed():
    install()
    yield
    uninstall()


@pytest.mark.parametrize(
    ("name", "real"),
    [
        ("paddle", "fleetx.paddle.api"),
        ("paddle.fluid", "fleetx.paddle.api.fluid"),
        ("paddle.static", "fleetx.paddle.api.static"),
        ("paddle.optimizer.lr", "fleetx.paddle.api.optimizer.lr"),
        ("paddle.fleet", "fleetx.paddle.api.fleet"),
        ("paddle.distributed.fleet", "fleetx.paddle.api.fleet"),
        ("paddle.fleet.base.role_maker", "fleetx.fleet.base.role_maker"),
        ("paddle.distributed.fleet.base.role_maker", "fleetx.fleet.base.role_maker"),
        ("fleet_lightning", "fleetx"),
        ("fleet_lightning.applications", "fleetx.applications"),
    ],
)
def test_a_module_is_the_same_under_both_names(installed, name, real):
    found = importlib.import_module(name)
    assert found is importlib.import_module(real)
    assert found.__spec__.name == found.__name__ == real


def test_every_name_that_is_said_to_be_covered_is_there(installed):
    modules = [m for n, m in sys.modules.items() if n.startswith("fleetx.paddle.api") and hasattr(m, "__all__")]
    assert len(modules) > 10
    for module in modules:
        for name in module.__all__:
            assert getattr(module, name) is not None, (module.__name__, name)


def test_fleet_has_all_that_fleetx_has():
    assert set(fleetx.fleet.__all__) <= set(home.fleet.__all__)
    assert home.fleet.init is fleetx.fleet.init
    assert home.fleet.updated in (True, False)  # which fleetx.fleet finds when it is asked


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "paddle.fluid.layers.fc",
            "^fleetx runs Paddle scripts whose model is one of fleetx.applications, .*layers.fc",
        ),
        ("paddle.nn.Linear", "build your model in torch and call fleet.distribute; see docs/coming_from_paddle.md"),
        ("paddle.fluid.ParamAttr", "^fleetx runs Paddle scripts whose model is one of fleetx.applications"),
        ("paddle.fluid.data", "^fleetx runs Paddle scripts whose model is one of fleetx.applications"),
        ("paddle.static.nn", "^fleetx runs Paddle scripts whose model is one of fleetx.applications"),
        ("paddle.fleet.init_server", "^fleetx does not support parameter servers, which .*init_server is for"),
        ("paddle.DataParallel", "^fleetx runs Paddle's static scripts only, not paddle.DataParallel"),
        ("paddle.fluid.Exector", "did you mean 'Executor'"),
        ("paddle.fluid.io.DataLoader", "^fleetx runs Paddle scripts whose model is one of fleetx.applications"),
        ("paddle.fluid.io.save_vars", r"use save_params\(folder\)"),
        ("paddle.fluid.optimizer.RecomputeOptimizer", r"Optimizer: set strategy\.recompute = True"),
        ("paddle.optimizer.RMSProp", r"does not support paddle\.optimizer\.RMSProp: .*paddle\.optimizer has SGD, Adam"),
        ("paddle.distributed.QueueDataset", "^fleetx does not support parameter servers"),
        ("paddle.distributed.fleet.util", r"does not support paddle\.distributed\.fleet\.util"),
        ("paddle.fluid.CompiledProgram", "there is no graph to compile: run the program itself"),
        ("paddle.disable_static", "for eager training use PyTorch"),
    ],
)
def test_an_attribute_that_is_not_covered_says_so_and_what_is(code, says):
    found = home
    with pytest.raises(AttributeError, match=says):  # noqa: PT012
        for name in code.split(".")[1:]:
            found = getattr(found, name)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import paddle.nn.functional as F", r"one of fleetx.applications, and has no paddle\.nn\.functional"),
        ("import paddle.vision", r"one of fleetx.applications, and has no paddle\.vision"),
        ("from paddle.fluid.dygraph import Linear", r"static scripts only, not paddle\.fluid\.dygraph"),
        (
            "import paddle.fluid.incubate.fleet.parameter_server",
            r"^fleetx does not support parameter servers, which paddle\.fluid\.incubate\.fleet\.parameter_server",
        ),
        ("from paddle.fluid import Exector", "did you mean 'Executor'"),
        ("from paddle.optimizer.lr import CosineDecay", r"does not support paddle\.optimizer\.lr\.CosineDecay"),
        (
            "from paddle.fluid.param_attr import ParamAttr",
            r"^fleetx runs .*applications, and has no paddle\.fluid\.param_attr",
        ),
        ("import paddle.fluid.profiler", r"^fleetx runs Paddle scripts whose model is one of fleetx\.applications"),
        ("import paddle.fluid.initializer", r"^fleetx runs Paddle scripts whose model is one of fleetx\.applications"),
        ("from paddle.io import Dataset", r"^fleetx runs Paddle scripts whose model is one of fleetx\.applications"),
        ("import paddle.fluid.incubate.data_generator", "^fleetx does not support parameter servers"),
        (
            "from paddle.dataset.cifar import *",
            "^fleetx runs Paddle scripts whose model is one of fleetx.applications",
        ),
        (
            "import paddle.distributed.fleet.utils",
            r"^fleetx does not support parameter servers .*distributed\.fleet\.utils",
        ),
        (
            "from fleet_lightning.dataset.bert_dataset import load_bert_dataset",
            "^fleetx has no 'dataset': the loaders are methods of the model",
        ),
        ("import paddle.fleet.utils", r"and has no paddle\.fleet\.utils; instead of its recompute"),
    ],
)
def test_an_import_that_is_not_covered_says_so_and_what_is(installed, line, says):
    with pytest.raises(ImportError, match=says):
        exec(line, {})


def test_it_is_said_once_by_the_first_worker_alone_and_not_to_who_only_asks(monkeypatch, capsys):
    for rank, said in (("0", "fleetx: `import paddle` gives fleetx: this script trains on PyTorch\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        finder = imports.Finder()
        found = [finder.find_spec(name) for name in ("paddle", "fleet_lightning")]
        assert finder.find_spec("numpy") is None
        assert capsys.readouterr().err == ""
        for spec in found:
            spec.loader.create_module(spec)
        assert capsys.readouterr().err == said


def test_paddle_itself_is_not_pushed_aside_once_it_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "paddle", types.ModuleType("paddle"))
    with pytest.raises(UsageError, match="Paddle is already imported"):
        install()


def test_the_mode_is_dynamic_until_static_is_enabled():
    assert home.in_dynamic_mode()
    home.enable_static()
    assert not home.in_dynamic_mode()
    assert not home.is_compiled_with_cuda()


# --- under fleetrun -------------------------------------------------------------------------------
WORKER = """
import fleetx.launch.runner as runner, importlib.util, sys
runner.serve_paddle_scripts()
importlib.util.find_spec("paddle"), importlib.util.find_spec("fleet_lightning")  # as a library asks
assert not {"torch", "fleetx.paddle.static"} & set(sys.modules)
if len(sys.argv) > 1:  # without importing it, which takes seconds
    print(importlib.util.find_spec("paddle").loader is runner.PaddleScripts)
else:
    import paddle
    print(paddle.__name__, hasattr(paddle, "its_own"))
"""


def imported(folder, *arguments, there, api):
    """What a worker's `import paddle` gives, with another paddle installed or not."""
    if there:
        (folder / "paddle.py").write_text("its_own = True\n")
    variables = {"PYTHONPATH": f"{PACKAGES}:{folder}", "FLEETX_DEVICE": "cpu"} | (
        {"FLEETX_PADDLE_API": api} if api else {}
    )
    return subprocess.run(
        [sys.executable, "-c", WORKER, *arguments],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
    )


def test_paddle_itself_is_taken_where_it_is_installed(tmp_path):
    for api in (None, "paddle"):
        assert imported(tmp_path, there=True, api=api).stdout == "paddle True\n"


def test_fleetx_stands_in_where_it_is_not_or_where_that_is_asked_for(tmp_path):
    assert imported(tmp_path, "find", there=False, api=None).stdout == "True\n"
    found = imported(tmp_path, there=True, api="fleetx")
    assert found.stdout == "fleetx.paddle.api False\n"
    assert found.stderr == "fleetx: `import paddle` gives fleetx: this script trains on PyTorch\n"


def test_without_either_nothing_is_found(tmp_path):
    assert "No module named 'paddle'" in imported(tmp_path, there=False, api="paddle").stderr
    assert "FLEETX_PADDLE_API=padle: must be fleetx or paddle" in imported(tmp_path, there=False, api="padle").stderr


def test_the_option_reaches_the_workers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    where = {"master_addr": "127.0.0.1", "master_port": 1, "endpoints": ("127.0.0.1:1",), "nodes": 1, "node": 0}
    attempt = Attempt(number=0, run_id="r", slots=(0,), restarts=0, **where)
    for words, expected in (([], None), (["--paddle-api", "fleetx"], "fleetx"), (["--paddle_api", "paddle"], "paddle")):
        job = parse(["--device", "cpu", *words, "train.py"], environ={})
        found = environment.worker_environment(
            job, attempt=attempt, local_rank=0, error_file=tmp_path / "e", environ={}
        )
        assert found.get("FLEETX_PADDLE_API") == expected
    with pytest.raises(LaunchError, match="'tensorflow' is not one of 'fleetx', 'paddle'"):
        parse(["--paddle-api", "tensorflow", "train.py"], environ={})


SPAWNS = """
import fleet_lightning, multiprocessing, os, sys


def told(pipe):
    pipe.send((fleet_lightning.__name__, os.getpid()))


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=told, args=(theirs,))
    child.start()
    child.join()
    name, process = ours.recv() if ours.poll() else ("nothing", 0)
    print(name, process not in (0, os.getpid()))
"""


def test_a_process_that_a_worker_spawns_finds_it_too_and_says_nothing(tmp_path):
    (tmp_path / "train.py").write_text(SPAWNS)
    command = [sys.executable, runner.__file__, str(os.getpid()), str(tmp_path / "log"), "script", "train.py"]
    subprocess.run(command, env={"PYTHONPATH": PACKAGES}, check=True, timeout=60, cwd=tmp_path)
    said = "fleetx: `import fleet_lightning` gives fleetx: this script trains on PyTorch\n"
    assert (tmp_path / "log").read_text() == f"{said}fleetx True\n"


def test_a_script_that_asks_for_the_version_is_told_whose_names_these_are():
    assert home.__version__ == "2.0.0"
