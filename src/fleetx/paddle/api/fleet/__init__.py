"""paddle.distributed.fleet and paddle.fleet: fleetx.fleet, but distributed_optimizer takes Paddle's optimizers too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from fleetx import fleet
from fleetx.applications import Program, Variable
from fleetx.comm.session import current
from fleetx.fleet import worker_index, worker_num
from fleetx.paddle.static import saving
from fleetx.paddle.static.imports import not_covered
from fleetx.paddle.static.optimizers import DistributedOptimizer, PaddleOptimizer
from fleetx.paddle.static.programs import default_main_program, default_startup_program
from fleetx.paddle.static.saving import save_persistables
from fleetx.paddle.static.strategy import PaddleStrategy as DistributedStrategy

main_program: Program  # as in Fleet 1.x; __getattr__ below resolves both
startup_program: Program

__all__ = ["DistributedStrategy", "distributed_optimizer", "worker_index", "worker_num"]
__all__ += ["save_inference_model", "save_persistables"]
__all__ += [name for name in fleet.__all__ if name not in __all__]


def distributed_optimizer(
    optimizer: PaddleOptimizer | Optimizer, strategy: fleet.DistributedStrategy | None = None
) -> DistributedOptimizer | Optimizer:
    """Return an optimizer whose `minimize(model.loss)` trains on all workers.

    torch's optimizers are passed on to fleetx.fleet.
    """
    if isinstance(optimizer, PaddleOptimizer):
        if missing := current().world is None:
            fleet.init(is_collective=True)
        distributed = DistributedOptimizer(optimizer, strategy)
        if missing:
            distributed.strategy.note(
                "a missing fleet.init()", "fleet.distributed_optimizer calls it with is_collective=True"
            )
        return distributed
    return fleet.distributed_optimizer(optimizer, strategy)


def save_inference_model(
    executor: Any,
    dirname: str | Path,
    feeded_var_names: Sequence[str],
    target_vars: Sequence[Variable],
    main_program: Program | None = None,
    export_for_deployment: bool = True,
) -> list[str]:
    """fluid.io.save_inference_model with the executor first."""
    return saving.save_inference_model(dirname, feeded_var_names, target_vars, executor, main_program)


_not_covered = not_covered(__name__)


def __getattr__(name: str) -> Any:
    if name in ("main_program", "startup_program"):
        return default_main_program() if name == "main_program" else default_startup_program()
    return getattr(fleet, name) if name in fleet.__all__ else _not_covered(name)
