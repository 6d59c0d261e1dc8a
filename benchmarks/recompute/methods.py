"""Methods of recomputation, all installed in one model. One is active at a time, so they can be timed in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.recompute.models import Model
from fleetx.base.module_names import named, named_modules
from fleetx.base.wrapping import Layer, wrap
from fleetx.parts.recompute import budget, segments
from fleetx.parts.recompute.chain import Chain

Active = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Method:
    name: str
    title: str
    active: Active  # entered around each forward
    predicted: int | None = None  # peak bytes
    limit: int | None = None
    added: float | None = None  # predicted seconds per step


def plain() -> Method:
    return Method("plain", "no recomputation", nullcontext)


def every_block(model: Model, module: nn.Module) -> Method:
    """As torch's documentation recommends: `checkpoint` around each block."""
    on = False

    def around(_: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, **kwargs) if on else inner(*args, **kwargs)

    modules = dict(named_modules(module))
    for name in named(module, model.blocks):
        wrap(modules[name], Layer.REPLAY, around)

    @contextmanager
    def active() -> Iterator[None]:
        nonlocal on
        on = True
        try:
            yield
        finally:
            on = False

    return Method("every", "torch's checkpoint, every block", active)


def square_root(model: Model, module: nn.Module) -> Method:
    """Like torch's checkpoint_sequential: sqrt(number of blocks) equal segments, of which the last is kept."""
    names = named(module, model.blocks)
    groups = max(2, round(math.sqrt(len(names))))
    ends = [names[len(names) * (i + 1) // groups - 1] for i in range(groups - 1)]
    modules = dict(named_modules(module))
    chain = Chain({name: modules[name] for name in names}, segments.NamedSegments(ends), nullcontext)
    return Method("sqrt", f"{groups} equal segments, as checkpoint_sequential", chain.forward)


def ours(module: nn.Module, planner: budget.Planner, limit: str, title: str) -> Method:
    plan = planner.choose(limit)
    active: Active = plan.install(module, nullcontext) if plan.tree else nullcontext
    return Method(f"ours {title}", f"memory_budget, {title}", active, plan.peak, plan.limit, plan.added)
