"""The states of the global random number generators of this process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def states(device: torch.device) -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [str(name), [int(k) for k in keys], int(rest[0]), int(rest[1]), float(rest[2])],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(saved: dict[str, Any], device: torch.device) -> None:
    random.setstate(saved["python"])
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"], device)
