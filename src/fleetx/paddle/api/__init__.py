"""What `import paddle` gives when fleetx replaces it: the names that static Fleet scripts use.

`fleet` and `optimizer` have their own files. The other modules only hold names, which are all listed here.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from fleetx.fleet import base, device_guard
from fleetx.paddle.api import fleet, optimizer
from fleetx.paddle.static import rates, saving
from fleetx.paddle.static.devices import CPUPlace, CUDAPlace, on_cpu
from fleetx.paddle.static.executor import Executor
from fleetx.paddle.static.imports import not_covered
from fleetx.paddle.static.programs import default_main_program, default_startup_program, script
from fleetx.paddle.static.regularization import ClipByGlobalNorm, L2Decay, L2DecayRegularizer, set_gradient_clip
from fleetx.paddle.static.strategy import PaddleStrategy
from fleetx.paddle.static.values import global_scope
from fleetx.strategy.ignored import BuildStrategy, ExecutionStrategy

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

__version__ = "2.0.0"  # the version that these names come from, for scripts that check it


def enable_static(place: object = None) -> None:
    """Only affects in_dynamic_mode: programs run in both modes. For eager training, use PyTorch."""
    script().static = True


def in_dynamic_mode() -> bool:
    """True until enable_static is called, as in Paddle 2."""
    return not script().static


def seed(number: int) -> None:
    """Seed the weights of applications created afterwards, and their dropout."""
    torch.manual_seed(number)


def is_compiled_with_cuda() -> bool:
    """Whether this run uses GPUs."""
    return not on_cpu()


class EOFException(Exception):  # noqa: N818  Paddle's name
    """In Paddle, raised by readers inside a program. Never raised here: a loader ends like any iterator."""


# --- modules that only hold names -----------------------------------------------------------------
def _module(name: str, **names: Any) -> ModuleType:
    """Make a module that can be imported as if it had a file. Errors list its names, classes before functions."""
    module = ModuleType(f"{__name__}.{name}")
    module.__spec__ = ModuleSpec(module.__name__, None)
    vars(module).update(names, __all__=sorted(names, key=lambda each: (not each.isupper(), each.islower(), each)))
    sys.modules[module.__name__] = module
    return module


def _of(owner: ModuleType, *names: str) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in names}


_PROGRAMS: dict[str, Any] = {
    "BuildStrategy": BuildStrategy, "ExecutionStrategy": ExecutionStrategy, "Executor": Executor,
    "default_main_program": default_main_program, "default_startup_program": default_startup_program,
    "device_guard": device_guard, "global_scope": global_scope,
}  # fmt: skip

distributed = _module("distributed", fleet=fleet, get_rank=fleet.worker_index, get_world_size=fleet.worker_num)
nn = _module("nn", ClipGradByGlobalNorm=ClipByGlobalNorm)
regularizer = _module("regularizer", L2Decay=L2Decay)
static = _module("static", **_PROGRAMS)
fluid = _module(  # Paddle before 2.0
    "fluid",
    **_PROGRAMS,
    CPUPlace=CPUPlace,
    CUDAPlace=CUDAPlace,
    clip=_module("fluid.clip", GradientClipByGlobalNorm=ClipByGlobalNorm, set_gradient_clip=set_gradient_clip),
    core=_module("fluid.core", EOFException=EOFException),
    incubate=_module(
        "fluid.incubate",
        fleet=_module(
            "fluid.incubate.fleet",
            base=base,
            collective=_module(  # Fleet 1.x, with the fleet of Paddle 2
                "fluid.incubate.fleet.collective",
                CollectiveOptimizer=fleet.distributed_optimizer,
                DistributedStrategy=PaddleStrategy,
                fleet=fleet,
            ),
        ),
    ),
    io=_module(
        "fluid.io",
        **_of(saving, "load_params", "load_persistables", "save_inference_model", "save_params", "save_persistables"),
    ),
    layers=_module(
        "fluid.layers",
        **_of(rates, "cosine_decay", "exponential_decay", "inverse_time_decay", "linear_lr_warmup"),
        **_of(rates, "natural_exp_decay", "noam_decay", "piecewise_decay", "polynomial_decay"),
    ),
    optimizer=_module("fluid.optimizer", **optimizer.FLUID),
    regularizer=_module("fluid.regularizer", L2Decay=L2DecayRegularizer, L2DecayRegularizer=L2DecayRegularizer),
)

# An unknown name in one of these modules raises an error that says why; fleet's own __getattr__ finds more names.
for _name in [name for name in sys.modules if f"{name}.".startswith(f"{__name__}.")]:
    vars(sys.modules[_name]).setdefault("__getattr__", not_covered(_name))
