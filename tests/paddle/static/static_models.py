"""A small application, described and ready to run."""

from __future__ import annotations

from typing import Any

from small_applications import batch, make

from fleetx import fleet
from fleetx.paddle.api import fleet as paddle_fleet
from fleetx.paddle.api import fluid
from fleetx.paddle.static import training


def minimized(name: str = "resnet", described: Any = None, declared: dict[str, Any] | None = None, **options: Any):
    """The model, after minimize and without its startup run."""
    fleet.init()
    model = make(name, **options)
    described = described or fluid.optimizer.Momentum(learning_rate=0.01, momentum=0.9)
    strategy = fleet.DistributedStrategy(**(declared or {}))
    paddle_fleet.distributed_optimizer(described, strategy).minimize(model.loss)
    return model


def started(name: str = "resnet", described: Any = None, declared: dict[str, Any] | None = None, **options: Any):
    """Model and executor, ready to train."""
    model = minimized(name, described, declared, **options)
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(model.startup_prog)
    return model, executor


def share(name: str, step: int, model: Any) -> dict[str, Any]:
    """What this replica of the model takes of a batch."""
    whole = batch(name, seed=step)
    return {k: v.chunk(fleet.replica_num(model))[fleet.replica_index(model)] for k, v in whole.items()}


def optimizer_of(model: Any) -> Any:
    return training.of(model).optimizer


def losses(model: Any, executor: Any, name: str, *, steps: int = 4) -> list[float]:
    return [
        executor.run(model.main_prog, share(name, step, model), [model.loss.name])[0].item() for step in range(steps)
    ]
