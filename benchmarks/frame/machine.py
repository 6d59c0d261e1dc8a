"""Where and when a figure was measured: without it the figure means nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

# What changes timings without changing code. Page faults of glibc's malloc alone halve or double some of them.
_VARIABLES = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "OMP_", "MKL_", "KMP_", "GOMP_", "ONEDNN_", "DNNL_", "ATEN_")


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "instructions": _instructions(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }


def load() -> list[float]:
    """The load averages over 1, 5 and 15 minutes."""
    return [round(x, 2) for x in os.getloadavg()]


def commit() -> str:
    """The commit of this file's repository, with `-dirty` if files have changed since; empty without a repository."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        out = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return out.stdout.strip()


def _cpu() -> str:
    return _cpuinfo("model name") or platform.processor()


def _instructions() -> list[str]:
    """What decides which kernels torch takes: half precision is 2 times faster with some, 40 times slower without."""
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
    return [flag for flag in wanted if flag in _cpuinfo("flags").split()]


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
