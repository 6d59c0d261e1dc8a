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


def check(saved: dict[str, Any]) -> None:
    """Raise an error if these are not valid states. Nothing is changed."""
    random.Random().setstate(saved["python"])
    np.random.RandomState().set_state(_of_numpy(saved))
    torch.Generator().set_state(saved["torch"])


def _of_numpy(saved: dict[str, Any]) -> Any:
    name, keys, *rest = saved["numpy"]
    return (name, np.array(keys, dtype=np.uint32), *rest)


def restore(saved: dict[str, Any], device: torch.device) -> None:
    random.setstate(saved["python"])
    np.random.set_state(_of_numpy(saved))
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"], device)
