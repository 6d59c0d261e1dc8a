"""The code for CUDA, run without a GPU: cuda_device.py says how, docs/results/cuda_paths.md what it shows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from cuda_scenarios import ALONE, RANKS, SHARDING, TWO_RANKS

import fleetx

HERE = Path(__file__).parent
SOURCE = Path(fleetx.__file__).parent
TORCH = Path(torch.__file__).parent
COMPILER = shutil.which("c++") or shutil.which("g++")

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="the device needs a C++ compiler"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA code of its own in that place"),
    pytest.mark.skipif(sys.platform != "linux", reason="the device is loaded as on Linux"),
]


@pytest.fixture(scope="module")
def seen(once):
    return once("cuda", _seen)


def _seen(folder):
    """What the children saw: one alone, two ranks, and one of eight whose shards have no values."""
    includes = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    command = [COMPILER, "-shared", "-fPIC", "-O0", "-std=c++20", str(HERE / "guard.cpp"), *includes]
    libraries = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(folder / "guard.so")]
    subprocess.run([*command, *libraries], check=True, timeout=200)
    path = os.pathsep.join([str(HERE), str(HERE.parent / "wide"), *sys.path])
    env = os.environ | {"PYTHONPATH": path, "FAKE_CUDA_GUARD": str(folder / "guard.so"), "FLEETX_WATCH": "0"}
    subprocess.run([sys.executable, str(HERE / "cuda_children.py"), str(folder)], env=env, check=True, timeout=250)
    return {name: json.loads((folder / name).read_text()) for name in ("alone", "sharding", "rank 0", "rank 1")}


def _found(seen, place, scenario):
    found = seen[place].get(scenario.name, {"failed": "an earlier one failed"})
    assert "failed" not in found, found["failed"]
    return found


PLACES = [("alone", s) for s in ALONE] + [(f"rank {r}", s) for s in TWO_RANKS for r in range(2)]
each = pytest.mark.parametrize(("place", "scenario"), PLACES, ids=lambda value: getattr(value, "name", value))


@each
def test_training_on_the_device_equals_training_on_the_cpu(seen, place, scenario):
    found = _found(seen, place, scenario)
    assert found["updates"] == (1 if "gradient_merge" in scenario.strategy else 2)
    assert found["error"] <= scenario.tolerance


@each
def test_the_host_waits_once_per_update_unless_the_mathematics_needs_more(seen, place, scenario):
    found = _found(seen, place, scenario)
    waits = Counter(found["reads"]) + Counter(found["sends"])
    told = (
        f"the host waits at {', '.join(waits)}, more often than {scenario.waits} per update: an act must not call "
        f".item() or copy from unpinned memory (docs/design/add_a_strategy.md)\n{found}"
    )
    assert waits.total() <= scenario.waits * found["updates"], told
    assert all((SOURCE / line.partition(":")[0]).is_file() for line in waits), f"not lines of fleetx: {waits}"


@pytest.mark.parametrize("place", ["alone", "rank 0", "rank 1"])
def test_offloaded_inputs_travel_on_a_stream_of_their_own_without_waiting(seen, place):
    scenario = next(s for s in ALONE if s.name == "recompute with offload")
    found = _found(seen, place, scenario)
    assert found["streams"] == 2
    assert sum(found["queued"].values()) == 2 * 2  # one segment, there and back, in two steps


@pytest.mark.parametrize("scenario", SHARDING, ids=lambda s: s.name)
def test_shards_stay_on_the_device(seen, scenario):
    found = _found(seen, "sharding", scenario)
    assert found["held"] == 1 / scenario.strategy["sharding"].get("sharding_degree", RANKS)
    flags = 2 if "amp" in scenario.strategy else 1  # a fake tensor is read one element at a time
    assert found["reads"] == flags * found["updates"]
    constants = [line for line in found["moves"] if "optim/foreach.py" not in line]  # fake ones are not kept there
    assert not constants


@pytest.mark.parametrize("name", ["loader", "overflow", "comparison", "weights", "checkpoint"])
def test_what_surrounds_a_step_works_on_the_device(seen, name):
    found = seen["alone"][f"around: {name}"]
    assert "failed" not in found, found["failed"]


@pytest.mark.parametrize("place", ["rank 0", "rank 1"])
@pytest.mark.parametrize("what", ["batches", "shapes"])
def test_ranks_of_a_pipeline_with_different_batches_are_told_before_the_update(seen, place, what):
    found = seen[place][f"around: different_{what}"]
    assert "failed" not in found, found["failed"]
