"""paddle.static: programs and their executor."""

from fleetx.fleet import device_guard
from fleetx.paddle.static.executor import Executor
from fleetx.paddle.static.programs import default_main_program, default_startup_program
from fleetx.paddle.static.scope import global_scope
from fleetx.strategy.ignored import BuildStrategy, ExecutionStrategy

__all__ = [
    "BuildStrategy",
    "ExecutionStrategy",
    "Executor",
    "default_main_program",
    "default_startup_program",
    "device_guard",
    "global_scope",
]
