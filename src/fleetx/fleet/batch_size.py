"""`fleet.largest_batch`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.sizes import parse_bytes
from fleetx.base.trees import arguments, tensors_of
from fleetx.comm.roles import ProcessInfo
from fleetx.comm.session import current
from fleetx.comm.world import World
from fleetx.errors import StrategyError, UsageError
from fleetx.fleet.auto import checked
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.part import switch_of

if TYPE_CHECKING:
    from fleetx.measure.largest_batch import LargestBatch


def largest_batch(
    model: nn.Module,
    sample: Any,
    *,
    memory: str | int,
    strategy: DistributedStrategy | None = None,
    optimizer: Optimizer | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    global_batch: int | None = None,
    ranks: int | None = None,
    trial: bool = True,
) -> LargestBatch:
    """The largest batch that fits into `memory` (such as "8GiB"), for a model that is not distributed yet.

    sample: a batch of any size. A dict is passed to the model as keyword arguments, a tuple or list as positional
        ones; if `loss_fn` is given, it is (inputs, targets).
    optimizer: AdamW if not given.
    global_batch: choose the batch so that global_batch = micro x merge x ranks.
    trial: check the prediction by one real step in a child process.
    """
    from fleetx.measure.fake_step import TrainingStep  # few scripts need it
    from fleetx.measure.largest_batch import search
    from fleetx.parts.recompute import budget

    plan = checked(strategy or DistributedStrategy()).plan()
    known = current().world
    ranks = ranks or (known.size if known is not None else 1)
    if divided := [switch_of(type(part)) for part in plan.parts if part.divides]:
        raise StrategyError(
            f"largest_batch assumes that each rank holds the whole model, but {' and '.join(divided)} divides it: turn "
            "it off for this call, and treat the answer as a lower bound"
        )
    if loss_fn is not None and not (isinstance(sample, tuple | list) and len(sample) == 2):
        raise UsageError("with loss_fn, sample must be a pair (inputs, targets)")
    inputs, targets = sample if loss_fn is not None else (sample, None)
    args, kwargs = arguments(inputs)
    samples = next((len(t) for t in tensors_of((args, kwargs)) if t.dim()), 0)
    if not samples:
        raise UsageError("sample must contain a tensor with at least one sample")
    optimizer = optimizer or torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    world = World(ProcessInfo(), torch.device("cpu"))
    asked = [part for part in plan.parts if part.changes_forward or part.segments]
    if problems := [text for part in asked for text in part.incompatibilities(model, optimizer, world)]:
        raise StrategyError(problems)
    step = TrainingStep.under(
        plan, model, optimizer, ranks=ranks, merge=bool(global_batch),
        args=args, kwargs=kwargs, loss_fn=loss_fn, targets=targets, samples=samples,
    )  # fmt: skip
    install = partial(budget.install_for, next((part for part in plan.parts if part.segments), None))
    return search(step, _bytes(memory), install, global_batch=global_batch, ranks=ranks, trial=trial)


def _bytes(memory: str | int) -> int:
    try:
        size = parse_bytes(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise UsageError(f"memory: {error}") from None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UsageError(f"memory: {memory!r} is not a number of bytes: write it as '6GiB' or 6442450944")
    return size
