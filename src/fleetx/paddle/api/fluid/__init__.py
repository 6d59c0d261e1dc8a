"""paddle.fluid: Paddle before 2.0."""

from fleetx.fleet import device_guard
from fleetx.paddle.api.fluid import clip, core, incubate, io, layers, optimizer, regularizer
from fleetx.paddle.static.devices import CPUPlace, CUDAPlace
from fleetx.paddle.static.executor import Executor
from fleetx.paddle.static.programs import default_main_program, default_startup_program
from fleetx.paddle.static.scope import global_scope
from fleetx.strategy.ignored import BuildStrategy, ExecutionStrategy

__all__ = [
    "BuildStrategy",
    "CPUPlace",
    "CUDAPlace",
    "ExecutionStrategy",
    "Executor",
    "clip",
    "core",
    "default_main_program",
    "default_startup_program",
    "device_guard",
    "global_scope",
    "incubate",
    "io",
    "layers",
    "optimizer",
    "regularizer",
]
