"""What `import paddle` gives when fleetx replaces it: the names that static Fleet scripts use."""

from __future__ import annotations

import sys

import torch

from fleetx.paddle.api import distributed, fleet, fluid, nn, optimizer, regularizer, static
from fleetx.paddle.api.mode import enable_static, in_dynamic_mode
from fleetx.paddle.not_covered import not_covered
from fleetx.paddle.static.devices import CPUPlace, CUDAPlace, on_cpu
from fleetx.paddle.static.programs import default_main_program, default_startup_program

__all__ = [
    "CPUPlace",
    "CUDAPlace",
    "default_main_program",
    "default_startup_program",
    "distributed",
    "enable_static",
    "fleet",
    "fluid",
    "in_dynamic_mode",
    "is_compiled_with_cuda",
    "nn",
    "optimizer",
    "regularizer",
    "seed",
    "static",
]

__version__ = "2.0.0"  # the version whose names these are, for scripts that check it

# A name that one of these modules does not have raises an error that says why; fleet finds more names itself.
for _name in [name for name in sys.modules if f"{name}.".startswith(f"{__name__}.")]:
    vars(sys.modules[_name]).setdefault("__getattr__", not_covered(_name))


def seed(number: int) -> None:
    """Seed the weights of applications that are created afterwards, and their dropout."""
    torch.manual_seed(number)


def is_compiled_with_cuda() -> bool:
    """Whether this run uses GPUs."""
    return not on_cpu()
