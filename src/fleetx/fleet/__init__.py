"""The facade: every function that a training script calls."""

from __future__ import annotations

import atexit
import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.comm import peers
from fleetx.comm.join import enter
from fleetx.comm.roles import PaddleCloudRoleMaker, UserDefinedRoleMaker, from_environment
from fleetx.comm.session import Entry, close, current
from fleetx.comm.world import TIMEOUT
from fleetx.engine.engine import Engine
from fleetx.engine.numbers import Checks
from fleetx.engine.plain import release as _release
from fleetx.engine.scheduled import ScheduledEngine
from fleetx.errors import StrategyError, UsageError
from fleetx.fleet import base
from fleetx.fleet.agreement import check_strategy, check_training, check_versions
from fleetx.fleet.auto import BatchPlan, branched, checked, planned, watch_feed
from fleetx.fleet.averaging import averaged
from fleetx.fleet.batch_size import largest_batch
from fleetx.fleet.loading import join, loader
from fleetx.fleet.noise import NoiseEstimate, noise_scale, trust_ratios
from fleetx.fleet.recording import attach, explained, log, progress, record
from fleetx.fleet.reductions import all_reduce, metrics
from fleetx.fleet.saving import checkpoints, export, keep_batch, latest, load, save
from fleetx.fleet.workers import (
    barrier_worker,
    device,
    is_first_worker,
    is_worker,
    local_rank,
    replica_index,
    replica_num,
    worker_endpoints,
    worker_index,
    worker_num,
)
from fleetx.parts.pipeline.device_guard import device_guard
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.explain import Explanation
from fleetx.strategy.stage import Stage

__all__ = [
    "Checks",
    "DistributedStrategy",
    "NoiseEstimate",
    "PaddleCloudRoleMaker",
    "UserDefinedRoleMaker",
    "all_reduce",
    "averaged",
    "backward",
    "barrier_worker",
    "base",
    "batch",
    "checkpoints",
    "device",
    "device_guard",
    "distribute",
    "distributed_model",
    "distributed_optimizer",
    "explain",
    "export",
    "flush",
    "forward_backward",
    "init",
    "is_first_worker",
    "is_worker",
    "join",
    "keep_batch",
    "largest_batch",
    "latest",
    "load",
    "loader",
    "local_rank",
    "log",
    "metrics",
    "noise_scale",
    "progress",
    "record",
    "release",
    "replica_index",
    "replica_num",
    "save",
    "trust_ratios",
    "updated",
    "weight",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]

Model = TypeVar("Model", bound=nn.Module)
Optim = TypeVar("Optim", bound=Optimizer)

updated: bool  # whether the last optimizer.step() applied an update (see __getattr__ below)


# --- the world ------------------------------------------------------------------------------------
@peers.naming()
def init(
    role_maker: PaddleCloudRoleMaker | UserDefinedRoleMaker | None = None,
    is_collective: bool = True,
    strategy: DistributedStrategy | None = None,
    *,
    timeout: timedelta | None = None,
    checks: Checks | None = None,
) -> None:
    """Join the workers that fleetrun, torchrun, Paddle's launcher or srun started; without a launcher, train alone.

    timeout: how long a collective waits for a rank that does not answer before it raises; 10 minutes by default.
    checks: what to do about gradients that are not finite, and how often to compare the parameters of the ranks.
    """
    session = current()
    if not isinstance(role_maker, PaddleCloudRoleMaker | UserDefinedRoleMaker | None):
        raise TypeError(f"role_maker must be one of fleet.base.role_maker, not {type(role_maker).__name__}")
    collective = role_maker.is_collective if role_maker is not None else is_collective
    if not collective:
        raise StrategyError(
            "fleetx does not support parameter servers, which is_collective=False asks for: pass "
            "is_collective=True to train collectively"
        )
    if strategy is not None:
        checked(strategy).plan()  # before any process group exists
        session.strategy = strategy
    if session.world is None:
        process = role_maker.process() if role_maker is not None else from_environment()
        session.world = enter(process, timeout=timeout or TIMEOUT)
    elif timeout is not None or (role_maker is not None and role_maker.process() != session.world.process):
        raise UsageError("fleet.init was already called with a different role or timeout: call it once")
    session.checks = checks or session.checks
    peers.start(session.here())
    if strategy is not None:
        check_strategy(strategy, session.here())


# --- the strategy ---------------------------------------------------------------------------------
@peers.naming()
def distribute(
    model: Model,
    optimizer: Optim,
    strategy: DistributedStrategy | None = None,
    *,
    sample: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
) -> tuple[Model, Optim]:
    """Apply a strategy to a model and its optimizer, in place. The training loop stays the same.

    sample: a batch of any size, for `strategy.auto` to measure with; (inputs, targets) if `loss_fn` is given.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    strategy = branched(checked(strategy or current().strategy or DistributedStrategy()))
    plan = strategy.plan()
    current().check_not_distributed(model, optimizer)
    world = current().here()
    peers.start(world)
    check_versions(current().checks, world)
    check_strategy(strategy, world)
    check_training(model, optimizer, world)
    found = planned(model, optimizer, strategy, world, sample, loss_fn)
    if found is not None:
        strategy, plan = found.strategy, found.strategy.plan()
    kind = ScheduledEngine if plan.at(Stage.SCHEDULE) else Engine
    engine = kind(plan, model, optimizer, world)
    atexit.unregister(close)
    atexit.register(close)
    current().entries[engine] = Entry(copy.deepcopy(strategy))  # later changes to the original have no effect here
    if found is not None:
        watch_feed(engine, found)
    attach(current(), engine)
    return cast("tuple[Model, Optim]", (engine.model, engine.optimizer))  # the same objects


def release(model: nn.Module | None = None) -> tuple[nn.Module, Optimizer]:
    """Undo `distribute`: returns the plain model and optimizer, with their own classes. Every rank must call it.

    Trained values and the optimizer's state stay; every rank gets the whole model. State that only a strategy keeps,
    such as the residuals of `dgc`, is discarded.
    """
    engine = _engine(model)
    peers.meet("fleet.release")
    plain = _release(engine)
    current().remove(engine)
    return plain


def distributed_model(model: Model) -> Model:
    """Paddle's first half of `distribute`. It takes effect once both halves have been called."""
    return cast("Model", _half("model", model))


def distributed_optimizer(optimizer: Optim, strategy: DistributedStrategy | None = None) -> Optim:
    """Paddle's second half of `distribute`. The two can be called in either order."""
    if strategy is not None:
        checked(strategy).plan()
        current().pending["strategy"] = strategy
    return cast("Optim", _half("optimizer", optimizer))


def _half(name: str, value: Any) -> Any:
    pending = current().pending
    if name in pending:
        raise UsageError(f"fleet.distributed_{name} was called twice: call distributed_model and distributed_optimizer")
    pending[name] = value
    if "model" not in pending or "optimizer" not in pending:
        return value
    given = dict(pending)
    pending.clear()
    model, optimizer = distribute(given["model"], given["optimizer"], given.get("strategy"))
    return model if name == "model" else optimizer


# --- training -------------------------------------------------------------------------------------
def forward_backward(
    inputs: Any,
    target: Any = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    model: nn.Module | None = None,
) -> Tensor:
    """Run forward and backward, in the form that works under every strategy. Returns the detached loss.

    A dict is passed to the model as keyword arguments, a tuple or list as positional ones. Without `loss_fn` the model
    must return its loss: a scalar tensor, or an output with a `loss`.
    """
    with peers.naming():
        return _engine(model).forward_backward(inputs, target, loss_fn)


def backward(loss: Tensor, *, optimizer: Optimizer | None = None) -> None:
    """`loss.backward()` for a loss that reads parameters directly, such as a penalty on weights."""
    with peers.naming():
        _engine_of(optimizer).backward(loss)


def weight(n: float | Tensor, optimizer: Optimizer | None = None) -> None:
    """Declare, before the backward of a step, that its loss is a mean over `n` items, such as tokens or samples.

    The update then uses sum(n * gradient) / sum(n) over merged steps and ranks, as one large batch would. Call it in
    every step on every rank, or never. 0 means that this batch does not count.
    """
    _engine_of(optimizer).weights.give(n)


def flush(*, optimizer: Optimizer | None = None) -> bool:
    """Apply the gradients of a partial merge window, divided by the actual number of steps. Every rank must call it.

    Returns whether an update was applied. Call it at the end of the data; otherwise these gradients wait for the next
    epoch.
    """
    engine = _engine_of(optimizer)
    if engine.flushes:
        peers.meet("fleet.flush")
    with peers.naming():
        return engine.flush()


def explain(strategy: DistributedStrategy | None = None, *, model: nn.Module | None = None) -> Explanation:
    """What is applied, in which order, why, and what it costs. Print it."""
    if strategy is not None:
        return Explanation(checked(strategy), strategy.plan(), current().world)
    return explained(current(), _engine(model))


def batch(*, model: nn.Module | None = None) -> BatchPlan:
    """How `auto` or `strategy.batch` splits the batch: create the loader with batch_size=fleet.batch().feed.

    Under `auto`, print it to see the search.
    """
    engine = _engine(model)
    plan: BatchPlan | None = current().entries[engine].batch_plan
    if plan is None:
        raise UsageError("fleet.batch() needs a strategy with auto or batch: turn one of them on")
    return plan


def _engine(model: nn.Module | None) -> Engine:
    return current().find(model)


def _engine_of(optimizer: Optimizer | None) -> Engine:
    return current().find(optimizer, by="optimizer")


def __getattr__(name: str) -> Any:
    if name == "updated":  # by the last optimizer.step() of any model; False before the first
        engine = current().last()
        return engine is not None and engine.updated
    raise AttributeError(f"module 'fleetx.fleet' has no attribute {name!r}")
