from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fleetx.base import seams
from fleetx.base.trees import as_real
from fleetx.comm.averaging import average
from fleetx.engine.context import StepContext
from fleetx.strategy.compose import Plan
from fleetx.strategy.cost_model import CostTerms
from fleetx.strategy.effect import Effect, more
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class EMA(Part):
    """Keep an exponential moving average of the parameters, for evaluation and export. It does not affect training.

    a <- d * a + (1 - d) * p after each update that was applied; a starts as p before the first one.
    d = decay, or with `power` the smaller of decay and (1 - 1/t)^(power + 1) in update t (Karras et al. 2024), which
    weights update i with about i^power. Neutral: any setting; training is the same bit for bit.
    """

    decay: Annotated[float, Field(ge=0, le=1)] = 0.999
    """Share of the old average that each update keeps."""
    power: Annotated[float, Field(ge=0)] | None = None
    """Let the window grow with training, so that it covers a fixed share of all updates. 0: their plain mean."""

    neutral: ClassVar[dict[str, float]] = {"decay": 0.0}
    per_parameter: ClassVar[tuple[str, ...]] = ("average",)
    effect: ClassVar[Effect] = more("behind", "the average lags behind the parameters")
    example: ClassVar[dict[str, float]] = {"decay": 0.8}
    costs: ClassVar[str] = (
        "memory: a copy of the parameters that this rank holds, in 32 bits at least; time: a pass over both per update"
    )

    def problems(self) -> Iterator[str]:
        if self.decay == 1 and self.power is None:
            yield "decay = 1 never moves the average: use a decay below 1, or set power as well"

    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        return {"updates": 0, "average": {}, "divided": False}

    def belongs_to_rank(self, state: Mapping[str, Any]) -> bool:
        """torch's own state_dict has this rank's shard of the average; `fleet.save` treats it like the parameters."""
        return bool(state.get("divided"))

    def for_other_ranks(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return states[0] | {"divided": False}

    def keeps(self, params: Iterable[Tensor], plan: Plan) -> int:
        return sum(p.numel() * _kept_in(p).itemsize for p in params if p.requires_grad)

    def cost(self, terms: CostTerms) -> None:
        terms.streamed += 3 * terms.parameters / terms.shards

    def share(self, updates: int) -> float:
        """The share of the old average that this update, counted from 1, keeps."""
        return self.decay if self.power is None else min(self.decay, (1 - 1 / updates) ** (self.power + 1))

    # --- acts -------------------------------------------------------------------------------------
    @at(Stage.GRADIENT)
    def begin(self, grads: list[Tensor], ctx: StepContext) -> None:
        """start the average from the parameters before their first update"""
        if ctx.in_progress.get("begun") is not ctx.params:  # a new list when parameters join the optimizer
            kept = ctx.state["average"]
            kept |= {name: p.to(_kept_in(p), copy=True) for name, p in ctx.trained.items() if name not in kept}
            ctx.state["divided"] = ctx.parted
            ctx.in_progress["begun"] = ctx.params

    @at(
        Stage.PARAMETER,
        bars={Fact.APART},
        because="it would average what no rank continues with",
    )
    def follow(self, params: list[Tensor], ctx: StepContext) -> None:
        """move the average towards the parameters, if the update was applied"""
        if not ctx.updated:
            return
        ctx.state["updates"] += 1
        weight = 1 - self.share(ctx.state["updates"])
        kept = ctx.state["average"]
        pairs = [(as_real(kept[name]), as_real(p)) for name, p in ctx.trained.items()]
        alike = [(a, p) for a, p in pairs if a.dtype is p.dtype]
        if alike:
            averages, values = (list(column) for column in zip(*alike, strict=True))
            seams.foreach_lerp_(averages, values, weight)
        for a, p in pairs:
            if a.dtype is not p.dtype:
                a.lerp_(p.to(a.dtype), weight)

    # --- evaluation -------------------------------------------------------------------------------
    @contextmanager
    def averaged(self, ctx: StepContext) -> Iterator[None]:
        """Inside, the parameters hold the average. If ranks train apart, it is the mean over them: a collective."""
        kept = ctx.state["average"]
        apart = ctx.apart and ctx.replica_group.size > 1
        followed = {name: p for name, p in ctx.trained.items() if name in kept}
        with ExitStack() as undo:
            for name, p in followed.items():
                if kept[name].dtype is p.dtype and not apart:  # swap them, to avoid another copy
                    _swap(p, kept[name])
                    undo.callback(_swap, p, kept[name])
                else:
                    undo.callback(p.copy_, p.clone())
                    p.copy_(kept[name])
            if apart:
                average(list(followed.values()), ctx.network)
            yield


def _kept_in(p: Tensor) -> torch.dtype:
    """At least float32: in 16 bits, a small step towards the parameters would be rounded away."""
    return torch.promote_types(p.dtype, torch.float32)


def _swap(p: Tensor, a: Tensor) -> None:
    before = p.clone()
    p.copy_(a)
    a.copy_(before)
