"""Kernels in Triton: optional, and compiled for the user's GPU when they are first used, so they are checked there."""

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

# Products and sums are rounded one by one, as in the interpreter, in which CI runs them. Memory is slower anyway.
OPTIONS = {"enable_fp_fusion": False}


class TritonKernels:
    """A module that imports triton, and a check of it on a device: what is wrong, or ""."""

    def __init__(self, module: str, check: Callable[[ModuleType, torch.device], str]):
        self._module, self._check = module, check
        self._found: dict[torch.device, str] = {}

    def available(self, device: torch.device) -> bool:
        return self.reason(device) == ""

    def reason(self, device: torch.device) -> str:
        """Why they cannot be used on this device, in a sentence; "" if they can. FLEETX_KERNELS=triton insists."""
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
        except Exception as error:  # it compiles, and calls the C compiler of the machine
            return f"triton does not work here: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def interpreted() -> bool:
    """Does Triton run its kernels in numpy? Then they take tensors in host memory."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def send(values: NDArray, device: torch.device) -> Tensor:
    """Numbers on the device, without waiting for it."""
    numbers = torch.from_numpy(values)
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)
