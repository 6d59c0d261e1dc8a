"""Triton kernels: optional, and compiled on first use for the user's GPU, so they are checked on that GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetx.base.compiled import asked_kernels

# No fused multiply-add: results match those of the interpreter, which CI uses. The kernels are memory-bound anyway.
OPTIONS = {"enable_fp_fusion": False}


class TritonKernels:
    """A module that imports triton, and a check that returns what is wrong with it on a device, or ""."""

    def __init__(self, module: str, check: Callable[[ModuleType, torch.device], str]):
        self._module, self._check = module, check
        self._found: dict[torch.device, str] = {}

    def available(self, device: torch.device) -> bool:
        return self.reason(device) == ""

    def reason(self, device: torch.device) -> str:
        """Why they cannot be used on this device, in a sentence; "" if they can. FLEETX_KERNELS=triton raises it."""
        asked = asked_kernels()
        if device.type != "cuda" and not (device.type == "cpu" and asked == "triton" and interpreted()):
            return "Triton's kernels are for CUDA devices"
        if asked == "foreach":
            return "FLEETX_KERNELS=foreach turns them off"
        if device not in self._found:
            self._found[device] = self._try(device)
        if asked == "triton" and self._found[device]:
            raise RuntimeError(f"FLEETX_KERNELS=triton: {self._found[device]}")
        return self._found[device]

    def loaded(self) -> ModuleType:
        return import_module(self._module)

    def _try(self, device: torch.device) -> str:
        if find_spec("triton") is None:
            return "triton is not installed: pip install 'fleetx[triton]'"
        try:
            with on(device):
                return self._check(self.loaded(), device)
        except Exception as error:  # of any kind: Triton compiles, and calls the machine's C compiler
            return f"triton does not work here: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def interpreted() -> bool:
    """Does Triton run its kernels in numpy? Then they take tensors in host memory."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one: Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def send(values: NDArray, device: torch.device) -> Tensor:
    """Copy numbers to the device, without waiting for it."""
    numbers = torch.from_numpy(values)
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)
