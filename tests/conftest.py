from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import shlex
from pathlib import Path

os.environ["FLEETX_DEVICE"] = "cpu"
os.environ["FLEETX_CACHE"] = ""  # nothing is stored, unless a test says where
os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, by whomever: its kernels run in numpy, without a GPU
os.environ["TRANSFORMERS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest
import torch

import forked_python
from layers import NIGHTLY, PRODUCTS, is_long, is_nightly, is_slow, left_out
from rank_pool import Ranks, forget, freeze_imports, imported_since_freeze

TESTS = Path(__file__).parent
UNHURRIED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}  # timings are not tests
hypothesis.settings.register_profile("explore", **UNHURRIED)
hypothesis.settings.register_profile("repeat", derandomize=True, **UNHURRIED)


def pytest_configure(config):
    """`make nightly` looks for new examples. Elsewhere they never change, so that a failure is about the change."""
    hypothesis.settings.load_profile("repeat" if "not nightly" in config.option.markexpr else "explore")
    workers = getattr(config.option, "numprocesses", None)  # of xdist
    if workers and not config.option.collectonly and "PYTEST_XDIST_WORKER" not in os.environ:
        fork = f"popen//python={shlex.join(forked_python.command())}"
        config.option.tx = [fork if spec == "popen" else spec for spec in config.option.tx]


def pytest_ignore_collect(collection_path, config):
    """Files without a test for this layer are not even imported: that alone would take a third of `make quick`."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(TESTS):
        return None
    place, wanted = collection_path.relative_to(TESTS).as_posix(), config.option.markexpr
    skipped = ("not slow" in wanted and is_slow(place)) or ("not nightly" in wanted and place.startswith(NIGHTLY))
    return True if skipped else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    """Mark the layers, before `-m` is applied, and put what it leaves in order."""
    products = {}
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        place = name.split("::")[0]
        if is_nightly(name):
            item.add_marker(pytest.mark.nightly)
        if is_slow(place) or "four" in item.fixturenames:
            item.add_marker(pytest.mark.slow)
        if name.partition("[")[0] in PRODUCTS:
            products.setdefault(name.partition("[")[0], {})[item] = tuple(item.callspec._idlist)
    for item in (item for cases in products.values() for item in left_out(cases)):
        item.add_marker(pytest.mark.nightly)
    yield
    items[:] = spread(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


def spread(items, workers):
    """Files of long tests first, in the share of each worker, so that short ones fill the end of a run on all of them.

    `--dist worksteal` first divides the tests into consecutive shares of equal size.
    """
    files = {}
    for item in items:
        files.setdefault(item.nodeid.split("::")[0], []).append(item)
    long = [tests for name, tests in files.items() if is_long(name)]
    short = [item for name, tests in files.items() if not is_long(name) for item in tests]
    out = []
    for worker in range(workers):
        mine = [item for tests in long[worker::workers] for item in tests]
        room = max(len(items) // workers - len(mine), 0) if worker < workers - 1 else len(short)
        out += mine + short[:room]
        short = short[room:]
    return out


def pytest_collection_finish():
    atexit.register(gc.unfreeze)  # triton reports as leaks whatever is frozen at exit
    gc.collect()
    freeze_imports()  # keeps collections short, which some tests ask for
    gc.set_threshold(10_000)  # and this makes them rarer


@pytest.fixture(scope="session")
def ranks():
    """Two ranks, for the whole run."""
    pool = Ranks(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def common(tmp_path_factory, testrun_uid):
    """common(name): a folder for all pytest workers of this run."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # common to the workers of a run

    def get(name):
        folder = shared / f"{name}-{testrun_uid[:8]}"
        folder.mkdir(exist_ok=True)
        return folder

    return get


@pytest.fixture(scope="session")
def once(common):
    """once(name, make): the JSON that `make(folder)` returns, made by one pytest worker for all of them."""

    def get(name, make):
        folder = common(name)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            result = folder / "result.json"
            if not result.exists():
                result.write_text(json.dumps(make(folder)))
        return json.loads(result.read_text())

    return get


@pytest.fixture(params=[pytest.param(60, id=""), pytest.param(3000, id="many", marks=pytest.mark.nightly)])
def examples(request):
    """How many random inputs a property is tried with."""
    return request.param


@pytest.fixture(autouse=True)
def _fresh():
    forget()
    if imported_since_freeze() > 200:
        gc.collect()
        freeze_imports()
    torch.default_generator.manual_seed(0)  # torch.manual_seed also formats the stack, for a GPU that may come later
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def four():
    """Four ranks, for the whole run."""
    pool = Ranks(4)
    yield pool
    pool.stop()
