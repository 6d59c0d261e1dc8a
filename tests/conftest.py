from __future__ import annotations

import os

os.environ["FLEETX_DEVICE"] = "cpu"
os.environ["FLEETX_CACHE"] = ""  # nothing is stored, unless a test says where
os.environ["TRANSFORMERS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest
import torch

from rank_pool import Ranks, forget

hypothesis.settings.register_profile("unhurried", deadline=None)  # timings are not tests
hypothesis.settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def ranks():
    """Two ranks, for the whole run."""
    pool = Ranks(2)
    yield pool
    pool.stop()


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
