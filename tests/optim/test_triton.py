"""Triton: which kernels are chosen and why, and that every kernel compiles for GPUs that are not here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from fleetx import fleet
from fleetx.base.triton_kernels import TritonKernels
from fleetx.optim import Lamb, Lars, dispatch, foreach, native
from fleetx.optim.dispatch import gpu
from fleetx.parts.dgc import codec, selection

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setenv("FLEETX_KERNELS", "triton")


def trained(kind, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    for _ in range(3):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@with_triton
@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_the_optimizers_equal_themselves_on_the_cpu(kind, monkeypatch):
    expected = trained(kind, weight_decay=0.01)
    monkeypatch.setenv("FLEETX_KERNELS", "triton")
    assert dispatch.flat_kernels(CPU) is gpu.loaded()
    torch.testing.assert_close(trained(kind, weight_decay=0.01), expected, rtol=1e-5, atol=1e-6)


@with_triton
def test_explain_names_triton(interpreted):
    assert "lamb: kernels on cpu: Triton" in str(fleet.explain(fleet.DistributedStrategy(lamb=True)))


def test_on_a_cpu_triton_is_not_chosen(monkeypatch):
    monkeypatch.delenv("FLEETX_KERNELS", raising=False)
    assert gpu.reason(CPU) == "Triton's kernels are for CUDA devices"
    assert dispatch.flat_kernels(CPU) is (native if native.available() else foreach)


def test_without_triton_a_gpu_gets_foreach_and_explain_says_how_to_get_it(monkeypatch):
    missing = TritonKernels("fleetx.optim.triton_kernels", lambda kernels, device: "")
    monkeypatch.setattr("fleetx.base.triton_kernels.find_spec", lambda name: None)
    monkeypatch.setattr(gpu, "available", missing.available)
    monkeypatch.setattr(gpu, "reason", missing.reason)
    assert dispatch.flat_kernels(CUDA) is foreach
    remark = "kernels on cuda:0: torch's foreach functions (triton is not installed: pip install 'fleetx[triton]')"
    assert dispatch.kernels_remark(CUDA) == remark
    monkeypatch.setenv("FLEETX_KERNELS", "triton")
    with pytest.raises(RuntimeError, match=r"FLEETX_KERNELS=triton: triton is not installed"):
        dispatch.flat_kernels(CUDA)


def test_foreach_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("FLEETX_KERNELS", "foreach")
    assert gpu.reason(CUDA) == "FLEETX_KERNELS=foreach turns them off"
    assert dispatch.flat_kernels(CUDA) is foreach


@with_triton
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_kernels_that_compute_something_else_are_not_used(interpreted, monkeypatch, name):
    wrong = TritonKernels("fleetx.optim.triton_kernels", gpu._check)
    right = getattr(wrong.loaded(), name)

    def off(params, *lists, **settings):
        right(params, *lists, **settings)
        params[-1][-1] += 0.01

    monkeypatch.setattr(wrong.loaded(), name, off)
    with pytest.raises(RuntimeError, match=f"the Triton kernel of {name} differs from torch by 0.0.* on cpu"):
        wrong.available(CPU)


@with_triton
def test_a_selection_that_differs_is_not_used(interpreted, monkeypatch):
    wrong = TritonKernels("fleetx.parts.dgc.triton_kernels", selection._check)
    right = wrong.loaded().select
    monkeypatch.setattr(wrong.loaded(), "select", lambda update: (right(update)[0].flip(0), right(update)[1]))
    with pytest.raises(RuntimeError, match="the Triton kernel of dgc and torch select different values on cpu"):
        wrong.available(CPU)


def test_a_triton_that_fails_is_a_reason_and_no_error(monkeypatch):
    def broken(kernels, device):
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr("fleetx.base.triton_kernels.find_spec", lambda name: True)
    monkeypatch.setattr(TritonKernels, "loaded", lambda self: None)
    found = TritonKernels("fleetx.optim.triton_kernels", broken)
    monkeypatch.setattr("fleetx.base.triton_kernels.on", lambda device: nullcontext())
    assert found.reason(CUDA) == "triton does not work here: RuntimeError: Failed to find C compiler"


@pytest.mark.slow
@with_triton
@pytest.mark.parametrize("target", [pytest.param("80", id="a100"), pytest.param("90", id="h100")])
def test_every_kernel_compiles(tmp_path, target):
    """To machine code, by the assembler that triton brings. In a process of its own, where nothing is interpreted."""
    script, modules = Path(__file__).with_name("compile_triton.py"), ["optim", "parts.dgc"]
    command = [sys.executable, str(script), target, *(f"fleetx.{module}.triton_kernels" for module in modules)]
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    compiled = {(name, found.removesuffix("a")) for name, found, size in lines if int(size) > 1000}
    files = [Path(dispatch.__file__).parent, Path(codec.__file__).parent]
    kernels = [k for f in files for k in re.findall(r"def (\w+_kernel)\(", (f / "triton_kernels.py").read_text())]
    assert len(kernels) == 10
    assert compiled == {(kernel, f"sm_{target}") for kernel in kernels}
