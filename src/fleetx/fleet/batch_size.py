"""`fleet.largest_batch`, in terms of a strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleetx.base.sizes import parse_bytes
from fleetx.base.trees import arguments, tensors_of
from fleetx.comm.roles import Place
from fleetx.comm.world import World
from fleetx.errors import StrategyError, UsageError
from fleetx.measure.fake_step import TrainingStep
from fleetx.measure.largest_batch import LargestBatch, search
from fleetx.parts.recompute import budget
from fleetx.strategy.compose import Plan
from fleetx.strategy.part import switch_of


def of_strategy(
    model: nn.Module, sample: Any, memory: str | int, plan: Plan, optimizer: Optimizer | None,
    loss_fn: Callable[..., torch.Tensor] | None, *, global_batch: int | None, ranks: int, trial: bool,
) -> LargestBatch:  # fmt: skip
    if divided := [switch_of(type(part)) for part in plan.parts if part.divides]:
        raise StrategyError(
            f"largest_batch assumes that each rank holds the whole model, but {' and '.join(divided)} divides it: turn "
            "that off for this question, and treat the answer as a lower bound"
        )
    if loss_fn is not None and not (isinstance(sample, tuple | list) and len(sample) == 2):
        raise UsageError("with loss_fn, sample must be a pair (inputs, targets)")
    inputs, targets = sample if loss_fn is not None else (sample, None)
    args, kwargs = arguments(inputs)
    samples = next((len(t) for t in tensors_of((args, kwargs)) if t.dim()), 0)
    if not samples:
        raise UsageError("sample must contain a tensor with at least one sample")
    optimizer = optimizer or torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    world = World(Place(), torch.device("cpu"))
    checked = [part for part in plan.parts if part.changes_forward or part.segments]
    if problems := [text for part in checked for text in part.incompatibilities(model, optimizer, world)]:
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
