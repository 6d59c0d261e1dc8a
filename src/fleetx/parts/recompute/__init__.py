"""`recompute`: keep fewer activations, and compute them again in backward.

segments.py   where segments begin and end
chain.py      runs the blocks of a model in segments
buffers.py    shields buffers from the second pass
offload.py    keeps the inputs of segments in host memory
budget.py     chooses segments for a number of bytes
solver.py     which blocks to keep and which to recompute
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from fleetx.base.module_names import named
from fleetx.base.sizes import parse_bytes
from fleetx.comm.world import World
from fleetx.engine.context import Context, SetupContext, StepContext
from fleetx.parts.recompute.chain import Chain
from fleetx.parts.recompute.offload import Offload
from fleetx.parts.recompute.segments import NamedSegments, blocks_around, incompatibilities
from fleetx.strategy.cost_model import Cluster, Offer
from fleetx.strategy.effect import Effect, more
from fleetx.strategy.part import NameList, Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class Recompute(Part):
    """Keep only the outputs of the named modules, or as much as a budget allows, and recompute the rest in backward.

    Random state is replayed, so dropout draws the same mask. Buffers that the first pass changed (BatchNorm's
    statistics) are shielded from the second, so they are updated once (pytorch issue 96136).
    Neutral: gradients equal those without it, bit for bit. Reference: Chen et al. 2016, arXiv 1604.06174.
    """

    checkpoints: NameList = Field(default_factory=list)
    """Names of modules as in `model.named_modules()`, or patterns that match level by level (`encoder.layer.*`)."""
    memory_budget: Annotated[
        str | Annotated[int, Field(gt=0)] | Annotated[float, Field(gt=0, lt=1)] | None,
        Field(description="a size such as '6GiB', a share such as 0.5, or 'min'"),
    ] = None
    """Instead of names: peak memory of a step, as "6GiB", as a share of the peak without recompute, or "min"."""
    enable_offload: bool = False
    """Move what is kept to host memory, and prefetch it one segment ahead."""
    checkpoint_shape: list[int] = Field(default_factory=list)
    """The shapes of what is kept, for Paddle's static memory planning."""

    no_meaning: ClassVar[dict[str, str]] = {"checkpoint_shape": "shapes are known when the model runs"}
    segments: ClassVar[bool] = True
    neutral: ClassVar[dict[str, list[str]]] = {"checkpoints": ["*"]}
    effect: ClassVar[Effect] = more("calls", "modules run twice", by=0.5)
    example: ClassVar[dict[str, Any]] = {"checkpoints": ["blocks.*"]}
    other_examples: ClassVar[tuple[dict[str, Any], ...]] = ({"memory_budget": "min"},)
    instead: ClassVar[dict[str, str]] = dict.fromkeys(
        ("pipeline", "sharding", "sync_batch_norm"), "set recompute_configs['checkpoints'] instead of 'memory_budget'"
    )
    costs: ClassVar[str] = "time: a second forward of what is recomputed; memory: only the inputs of segments are kept"

    def problems(self) -> Iterator[str]:
        if self.memory_budget is None and not self.checkpoints:
            yield (
                "checkpoints is empty, so nothing would be recomputed: name modules, set memory_budget, or turn "
                "recompute off"
            )
        if self.memory_budget is not None and self.checkpoints:
            yield "checkpoints and memory_budget cannot both be set: keep one"
        if isinstance(self.memory_budget, str) and self.memory_budget != "min":
            try:
                parse_bytes(self.memory_budget)
            except ValueError as error:
                yield f"memory_budget: {error}, or use a share such as 0.5, or 'min'"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        yield from incompatibilities(model, self.checkpoints)
        if self.memory_budget is not None and not any(p.requires_grad for p in model.parameters()):
            yield "memory_budget: no parameter requires a gradient, so nothing can be recomputed: turn recompute off"
        if self.enable_offload and all(p.device.type == "cpu" for p in model.parameters()):
            yield "enable_offload: the model is already in host memory, so there is nothing to move: turn it off"

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        yield Offer({"memory_budget": cluster.memory})
        yield Offer({"memory_budget": "min"})

    @at(Stage.MODEL, when=lambda self: self.memory_budget is None)
    def segment(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """divide the model into segments that keep only their inputs and are recomputed in backward"""
        names = named(model, self.checkpoints)
        staged = any(Fact.STAGED in act.claim.makes for act in ctx.plan.acts)
        ctx.notes["segments"] = NamedSegments(names, staged=staged)
        ctx.notes["chain"] = Chain(blocks_around(model, names), ctx.notes["segments"], ctx.forward, self._offload(ctx))
        return model

    @at(Stage.FORWARD, replay=False, when=lambda self: self.memory_budget is None)
    def count(self, ctx: StepContext) -> AbstractContextManager[Any]:
        """count the calls of the modules, to tell the segments apart"""
        chain: Chain = ctx.notes["chain"]
        return chain.forward()

    @at(
        Stage.FORWARD,
        replay=False,
        unbuilt={Fact.PARTED, Fact.STAGED, Fact.TOGETHER},  # each rank times its own blocks and may choose differently
        when=lambda self: self.memory_budget is not None,
    )
    def fit(self, ctx: StepContext) -> AbstractContextManager[Any]:
        """choose the fastest segments that fit into memory_budget, for a model that each rank holds whole"""
        if torch.is_grad_enabled():
            ctx.notes["chain"] = self._planned(ctx)
        chain = ctx.notes.get("chain")
        return chain.forward() if chain is not None else nullcontext()

    def _planned(self, ctx: StepContext) -> Chain | None:
        """The chain for these inputs. Makes a new plan if no earlier one covers them."""
        from fleetx.parts.recompute import budget  # not needed if modules are named

        assert self.memory_budget is not None
        plans = ctx.notes.setdefault("plans", [])
        inputs = ctx.inputs
        for known in plans:
            if known.covers(ctx.model, inputs):
                return known.chain
        plans.append(budget.install(self.memory_budget, ctx, inputs, self._offload(ctx)))
        return plans[-1].chain

    def _offload(self, ctx: Context) -> Offload | None:
        return Offload(ctx.device) if self.enable_offload else None

    def predicted(self, ctx: StepContext) -> int | None:
        return max((installed.plan.peak for installed in ctx.notes.get("plans", ())), default=None)

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is None:
            return
        for installed in ctx.notes.get("plans", ()):
            yield str(installed.plan)
        if "segments" in ctx.notes and (unused := ctx.notes["segments"].unused):
            yield f"{', '.join(sorted(unused))} was not called in the last forward, so none of its output is kept"
