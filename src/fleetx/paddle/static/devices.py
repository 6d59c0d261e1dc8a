"""Where to compute, in Paddle's words. Which device a worker has was decided when it was started."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

from fleetx.comm.roles import from_environment
from fleetx.errors import UsageError

_said: set[str] = set()


def on_cpu() -> bool:
    """As `fleet.device()`, which can be asked only after `fleet.init`."""
    kind = os.environ.get("FLEETX_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    return kind == "cpu"


def say_once(text: str) -> None:
    """On the first worker."""
    if text not in _said and from_environment().rank == 0:
        print(f"fleetx: {text}", file=sys.stderr, flush=True)
    _said.add(text)


@dataclass(frozen=True)
class CPUPlace:
    def check(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise UsageError(f"CPUPlace() is given, and this worker trains on {device}: start it with --device cpu")


@dataclass(frozen=True)
class CUDAPlace:
    """One GPU of this machine; on a machine that trains on its CPU it means that."""

    device_id: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.device_id, bool) or not isinstance(self.device_id, int) or self.device_id < 0:
            raise UsageError(f"CUDAPlace({self.device_id!r}): must be the number of a GPU, from 0")
        if on_cpu():
            say_once("CUDAPlace means the CPU here, where this run computes")

    def check(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index != self.device_id:
            raise UsageError(
                f"CUDAPlace({self.device_id}) is given, and this worker trains on {device}: write "
                "CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0)))"
            )


Place = CPUPlace | CUDAPlace
