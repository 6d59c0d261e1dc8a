"""Paddle's places. The device of a worker is fixed when it starts; a place is only checked against it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from fleetx.comm.notices import say_once
from fleetx.errors import UsageError


def on_cpu() -> bool:
    """Whether this run uses the CPU. Unlike `fleet.device()`, it works before `fleet.init`."""
    kind = os.environ.get("FLEETX_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    return kind == "cpu"


@dataclass(frozen=True)
class CPUPlace:
    def check(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise UsageError(
                f"the script uses CPUPlace(), but this worker trains on {device}: start it with --device cpu"
            )


@dataclass(frozen=True)
class CUDAPlace:
    """A GPU of this machine, or the CPU if the worker trains on the CPU."""

    device_id: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.device_id, bool) or not isinstance(self.device_id, int) or self.device_id < 0:
            raise UsageError(f"CUDAPlace({self.device_id!r}): must be the number of a GPU, starting at 0")
        if on_cpu():
            say_once("CUDAPlace means the CPU here, because this run uses the CPU")

    def check(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index != self.device_id:
            raise UsageError(
                f"the script uses CUDAPlace({self.device_id}), but this worker trains on {device}: write "
                "CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0)))"
            )


Place = CPUPlace | CUDAPlace
