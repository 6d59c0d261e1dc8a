from __future__ import annotations

import fcntl
import gc
import json
import os

os.environ["FLEETX_DEVICE"] = "cpu"
os.environ["FLEETX_CACHE"] = ""  # nothing is stored, unless a test says where
os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, by whomever: its kernels run in numpy, without a GPU
os.environ["TRANSFORMERS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest
import torch

from rank_pool import Ranks, forget

UNHURRIED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}  # timings are not tests
hypothesis.settings.register_profile("explore", **UNHURRIED)
hypothesis.settings.register_profile("repeat", derandomize=True, **UNHURRIED)


def pytest_configure(config):
    """`make nightly` looks for new examples. Elsewhere they never change, so that a failure is about the change."""
    hypothesis.settings.load_profile("repeat" if "not nightly" in config.option.markexpr else "explore")


# Which layer a test belongs to (see CONTRIBUTING). A test that is not listed is in all of them.
SLOW = (
    "launch/", "integrations/", "record/", "report/", "test_compile", "test_critical_batch",
    "test_examples", "test_subsets", "test_release", "test_agreement", "test_checkpoint", "test_auto",
    "test_export", "test_predicted_bytes", "test_budget", "test_odd_models", "test_transformers", "test_largest_batch",
    "test_child",
    "test_bert_and_gpt2", "test_lost_rank", "parts/test_pipeline", "test_static_documents", "test_static_equals_eager",
    "test_static_imports", "test_download_", "test_application_training", "test_paths", "test_cut_points",
    "test_loss_weights", "test_multi_gpu_trainer", "test_exactness", "test_guests", "test_buffers", "test_sharding",
    "test_odd_gradients", "test_complex_parameters", "test_dgc", "test_payload", "test_kernels", "test_data_loader",
    "test_cuda_paths", "test_wide_worlds", "integrations/",
    "test_loops", "test_lost_ranks", "test_numbers", "test_unfreezing", "test_alone", "test_user_line",
    "test_torch_checkpoint", "test_compile", "test_metrics",
)  # fmt: skip
NIGHTLY = ("bench/",)


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(items):
    for item in items:
        place = item.nodeid.split("::")[0].removeprefix("tests/")
        if any(place.startswith(name) or f"/{name}" in f"/{place}" for name in NIGHTLY):
            item.add_marker(pytest.mark.nightly)
        if any(f"/{name}" in f"/{place}" for name in SLOW) or "four" in item.fixturenames:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what the tests import is no garbage: collections, which some tests ask for, stay short


@pytest.fixture(scope="session")
def ranks():
    """Two ranks, for the whole run."""
    pool = Ranks(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def once(tmp_path_factory, testrun_uid):
    """once(name, make): the JSON that `make(folder)` returns, made by one pytest worker for all of them."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # common to the workers of a run

    def get(name, make):
        folder = shared / f"{name}-{testrun_uid}"
        folder.mkdir(exist_ok=True)
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
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def four():
    """Four ranks, for the whole run."""
    pool = Ranks(4)
    yield pool
    pool.stop()
