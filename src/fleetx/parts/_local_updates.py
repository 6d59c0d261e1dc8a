"""What LocalSGD and its adaptive sister share: rounds without communication, and the average that ends a period."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from fleetx.comm import averaging
from fleetx.comm.world import World
from fleetx.engine.context import Bucket, StepContext
from fleetx.errors import UsageError


def problems(part: Any) -> Iterator[str]:
    if part.overlap and _outer(part):
        yield "overlap and an outer optimizer exclude each other: keep one of overlap and outer_lr / outer_momentum"
    if part.overlap and part.average_momentum:
        yield "overlap and average_momentum exclude each other: keep one"
    if not part.overlap and part.overlap_share != type(part)().overlap_share:
        yield "overlap_share has no effect without overlap: turn overlap on, or remove it"


def incompatibilities(switch: str, part: Any, world: World) -> Iterator[str]:
    if world.size == 1 and not part.allow_single:
        yield (
            f"{switch}: there is one worker, so there is nothing to communicate: start more with fleetrun, or set "
            f"strategy.{switch}_configs['allow_single'] = True for debugging"
        )


def keeps(part: Any, params: Iterable[Tensor]) -> int:
    """Two copies: what was sent and its mean, or the anchor and the momentum of the outer optimizer."""
    return 2 * sum(p.nbytes for p in params) if part.overlap or _outer(part) else 0


def keep(part: Any, bucket: Bucket, ctx: StepContext) -> Future[Tensor]:
    if _outer(part) and "anchor" not in ctx.state:
        _anchor(ctx)
    return averaging.done(bucket.buffer)


def average(part: Any, params: list[Tensor], ctx: StepContext) -> None:
    """End a period."""
    ctx.state["last"] = ctx.round
    if part.overlap:
        _background(part, ctx).turn(params)
    elif _outer(part) and ctx.replica_group.size > 1:
        _outer_step(part, params, ctx)
    else:
        averaging.average(params, ctx.network)
    if part.average_momentum:
        averaging.average(_gathered(params, ctx), ctx.network)
    _buffers(part, ctx)


def drain(part: Any, params: list[Tensor], ctx: StepContext, *, last: bool) -> None:
    """At the end of training, bring in what is under way and average what was done since; or keep it for later."""
    if last:
        if part.overlap:
            _background(part, ctx).finish(params)
            averaging.average(params, ctx.network)  # what an average in the background leaves are small distances
            _buffers(part, ctx)
        elif ctx.round > ctx.state["last"]:
            average(part, params, ctx)
    elif part.overlap:
        ctx.notes["kept"] = ctx.state["under_way"] = _background(part, ctx).saved()


def _background(part: Any, ctx: StepContext) -> averaging.Background:
    """The average that is under way, be it that of a checkpoint."""
    background = ctx.notes.setdefault("under_way", averaging.Background(ctx.network, part.overlap_share))
    saved = ctx.state.pop("under_way", None)
    if saved is not None and saved is not ctx.notes.get("kept"):
        background.load(saved)
    return background


def _outer(part: Any) -> bool:
    return part.outer_lr != 1.0 or part.outer_momentum != 0.0


def _anchor(ctx: StepContext) -> None:
    """Where the outer optimizer measures from: made before the first update, when the ranks are still equal."""
    if ctx.round:  # a checkpoint had none, and the ranks may have parted since their last average
        averaging.average(list(ctx.names), ctx.network)
    ctx.state["anchor"] = {name: p.detach().clone() for p, name in ctx.names.items()}
    ctx.state["outer"] = {name: torch.zeros_like(a) for name, a in ctx.state["anchor"].items()}


def _outer_step(part: Any, params: list[Tensor], ctx: StepContext) -> None:
    averaging.average(params, ctx.network)
    if "anchor" not in ctx.state:
        return
    names = [ctx.names[p] for p in params]  # type: ignore[index]
    anchors = [ctx.state["anchor"][name] for name in names]
    buffers = [ctx.state["outer"][name] for name in names]
    for p, a, b in zip(params, anchors, buffers, strict=True):  # one tensor at a time: no copy of the model
        step = a - p.detach()
        b.mul_(part.outer_momentum).add_(step)
        a.sub_(step.add_(b, alpha=part.outer_momentum), alpha=part.outer_lr)
        p.detach().copy_(a)


def _gathered(params: list[Tensor], ctx: StepContext) -> list[Tensor]:
    """What the optimizer keeps for each parameter in its shape: momentum, moments."""
    state = ctx.optimizer.state
    found = [s for p in params for _, s in sorted(state.get(p, {}).items()) if isinstance(s, Tensor)]
    found = [s for s in found if s.dim() and s.is_floating_point()]
    sizes = (
        ctx.replica_group.gather(torch.tensor([sum(s.numel() for s in found)], device=ctx.device)).flatten().tolist()
    )
    if len(set(sizes)) > 1:
        raise UsageError(
            f"average_momentum: the optimizers of the ranks have gathered different numbers of values ({sizes}), "
            "because some parameters got a gradient on some ranks only"
        )
    return found


def _buffers(part: Any, ctx: StepContext) -> None:
    if ctx.replica_group.size == 1:
        return
    buffers = [b for b in ctx.model.buffers() if b is not None]
    floats = [b for b in buffers if b.is_floating_point()] if part.average_buffers else []
    averaging.average(floats, ctx.network)
    ctx.replica_group.broadcast([b for b in buffers if not any(b is f for f in floats)])
