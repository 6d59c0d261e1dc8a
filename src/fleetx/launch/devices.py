"""Which GPUs there are, and which of them are meant. Answers without importing torch wherever NVIDIA's driver can."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence

from fleetx.errors import LaunchError

CPU, CUDA = "cpu", "cuda"


def installed_gpus() -> int:
    """How many GPUs the driver reports, before CUDA_VISIBLE_DEVICES."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            count = ctypes.c_uint(0)
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            nvml.nvmlShutdown()
            return count.value
    except (OSError, AttributeError):
        pass
    if os.path.exists("/dev/kfd"):  # AMD: its driver has no such small library, so torch has to answer
        import torch

        return torch.cuda.device_count()
    return 0


def visible_gpus(*, installed: int, given: Mapping[str, str]) -> list[str]:
    """The ids (or UUIDs) that CUDA would show, in its order."""
    named = given.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(installed)]
    visible = []
    for word in (part.strip() for part in named.split(",")):
        if not word or word == "-1" or (word.isdigit() and int(word) >= installed):
            break  # CUDA's own rule: nothing after the first invalid one is seen
        visible.append(word)
    return visible if installed else []


def device_of(
    option: str | None, *, gpus: Sequence[str] | None, visible: Sequence[str], given: Mapping[str, str]
) -> str:
    """--device, else $FLEETX_DEVICE, else cuda where there are GPUs or where GPUs were named."""
    if option:
        return option
    named = given.get("FLEETX_DEVICE")
    if named:
        if named not in (CPU, CUDA):
            raise LaunchError(f"FLEETX_DEVICE={named} is neither {CPU} nor {CUDA}")
        return named
    return CUDA if visible or gpus is not None else CPU


def gpus_of(
    gpus: Sequence[str] | None, *, nproc: int | None, visible: Sequence[str], given: Mapping[str, str]
) -> list[str]:
    """The GPUs of the workers, one each, or an error that says what is missing."""
    if not visible:
        asked = f"--gpus {','.join(gpus)}" if gpus is not None else "--device cuda"
        workers = len(gpus) if gpus is not None else (nproc or 1)
        hidden = " (CUDA_VISIBLE_DEVICES hides all)" if "CUDA_VISIBLE_DEVICES" in given and installed_gpus() else ""
        raise LaunchError(
            f"{asked}: this machine has no GPU{hidden}; to run the same {workers} "
            f"worker{'s' if workers > 1 else ''} on the CPU, add --device cpu or set FLEETX_DEVICE=cpu"
        )
    if gpus is None:
        if nproc is not None and nproc > len(visible):
            raise LaunchError(f"--nproc_per_node {nproc}: there are only {len(visible)} GPUs ({','.join(visible)})")
        return list(visible[:nproc])
    unknown = [gpu for gpu in gpus if gpu not in visible]
    if unknown:
        why = " in CUDA_VISIBLE_DEVICES" if "CUDA_VISIBLE_DEVICES" in given else ""
        raise LaunchError(f"--gpus {','.join(gpus)}: no GPU {','.join(unknown)}; there are {','.join(visible)}{why}")
    return list(gpus)
