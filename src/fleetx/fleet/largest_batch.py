"""`fleet.largest_batch`: the question in terms of a strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleetx.base.sizes import parse
from fleetx.base.trees import arguments, tensors_of
from fleetx.comm.roles import Place
from fleetx.comm.world import World
from fleetx.errors import StrategyError, UsageError
from fleetx.measure.fake_step import Step
from fleetx.measure.largest_batch import Batch, answer
from fleetx.parts.recompute import budget
from fleetx.strategy.compose import Plan
from fleetx.strategy.part import switch_of
from fleetx.strategy.stage import Fact


def of_strategy(
    model: nn.Module, sample: Any, memory: str | int, plan: Plan, optimizer: Optimizer | None,
    loss_fn: Callable[..., torch.Tensor] | None, *, global_batch: int | None, ranks: int, trial: bool,
) -> Batch:  # fmt: skip
    """For fleet.largest_batch."""
    if divided := [switch_of(type(part)) for part in plan.parts if part.divides]:
        raise StrategyError(
            f"largest_batch counts for a rank that holds the whole model, and {' and '.join(divided)} divides it: "
            "leave that out, and take the answer for a lower bound"
        )
    if loss_fn is not None and not (isinstance(sample, tuple | list) and len(sample) == 2):
        raise UsageError("with loss_fn the sample must be a pair: (inputs, targets)")
    inputs, targets = sample if loss_fn is not None else (sample, None)
    args, kwargs = arguments(inputs)
    samples = next((len(t) for t in tensors_of((args, kwargs)) if t.dim()), 0)
    if not samples:
        raise UsageError("the sample must have at least one tensor with at least one sample in it")
    optimizer = optimizer or torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    here = World(Place(), torch.device("cpu"))
    judged = [part for part in plan.parts if part.changes_forward or part.segments]
    if wrong := [sentence for part in judged for sentence in part.incompatibilities(model, optimizer, here)]:
        raise StrategyError(wrong)
    made = frozenset().union(*(act.claim.makes for act in plan.acts))
    step = Step(
        model,
        optimizer,
        args,
        kwargs,
        loss_fn,
        targets,
        samples=samples,
        parts=[part for part in plan.parts if part.changes_forward],
        kept_gradients=Fact.SUMMED in made or ranks > 1 or bool(global_batch),
        beside=sum(part.keeps(list(model.parameters()), scaled=Fact.SCALED in made) for part in plan.parts)
        + (budget.buckets(model) if ranks > 1 and (Fact.SUMMED in made or global_batch) else 0),
    )
    bytes_ = _bytes(memory)
    arm = partial(budget.arm_of, next((p for p in plan.parts if p.segments), None))
    return answer(step, bytes_, arm, global_batch=global_batch, ranks=ranks, trial=trial)


def _bytes(memory: str | int) -> int:
    try:
        found = parse(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise UsageError(f"memory: {error}") from None
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise UsageError(f"memory: {memory!r} is not a number of bytes such as '6GiB' or 6442450944")
    return found
