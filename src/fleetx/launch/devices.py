"""Which GPUs this machine has, and which to use. Asks NVIDIA's driver, so that torch need not be imported."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence

from fleetx.errors import LaunchError

CPU, CUDA = "cpu", "cuda"


def installed_gpus() -> int:
    """The number of GPUs that the driver reports, ignoring CUDA_VISIBLE_DEVICES."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            count = ctypes.c_uint(0)
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            nvml.nvmlShutdown()
            return count.value
    except (OSError, AttributeError):
        pass
    if os.path.exists("/dev/kfd"):  # AMD's driver has no small library like NVML, so ask torch
        import torch

        return torch.cuda.device_count()
    return 0


def visible_gpus(*, installed: int, environ: Mapping[str, str]) -> list[str]:
    """The indices (or UUIDs) of the GPUs that CUDA would use, in its order."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(installed)]
    visible = []
    for gpu in (item.strip() for item in named.split(",")):
        if not gpu or gpu == "-1" or (gpu.isdigit() and int(gpu) >= installed):
            break  # like CUDA, ignore everything after the first invalid entry
        visible.append(gpu)
    return visible if installed else []


def device_of(
    option: str | None, *, gpus: Sequence[str] | None, visible: Sequence[str], environ: Mapping[str, str]
) -> str:
    """--device, else $FLEETX_DEVICE, else cuda if there are GPUs or --gpus is given."""
    if option:
        return option
    named = environ.get("FLEETX_DEVICE")
    if named:
        if named not in (CPU, CUDA):
            raise LaunchError(f"FLEETX_DEVICE={named}: must be {CPU} or {CUDA}")
        return named
    return CUDA if visible or gpus is not None else CPU


def gpus_of(
    gpus: Sequence[str] | None, *, nproc: int | None, visible: Sequence[str], environ: Mapping[str, str]
) -> list[str]:
    """The GPUs to use, one per worker. Raises LaunchError if there are not enough."""
    if not visible:
        option = f"--gpus {','.join(gpus)}" if gpus is not None else "--device cuda"
        workers = len(gpus) if gpus is not None else (nproc or 1)
        hidden = " visible (see CUDA_VISIBLE_DEVICES)" if "CUDA_VISIBLE_DEVICES" in environ and installed_gpus() else ""
        raise LaunchError(
            f"{option}: this machine has no GPU{hidden}; to run the same {workers} "
            f"worker{'s' if workers > 1 else ''} on the CPU, add --device cpu or set FLEETX_DEVICE=cpu"
        )
    if gpus is None:
        if nproc is not None and nproc > len(visible):
            raise LaunchError(f"--nproc_per_node {nproc}: only {len(visible)} GPUs are available ({','.join(visible)})")
        return list(visible[:nproc])
    unknown = [gpu for gpu in gpus if gpu not in visible]
    if unknown:
        source = "CUDA_VISIBLE_DEVICES has" if "CUDA_VISIBLE_DEVICES" in environ else "this machine has"
        raise LaunchError(
            f"--gpus {','.join(gpus)}: GPU {','.join(unknown)} does not exist; {source} {','.join(visible)}"
        )
    return list(gpus)
