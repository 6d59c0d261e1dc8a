from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.module_names import has_forward, named_modules
from fleetx.comm.world import World
from fleetx.engine.context import SetupContext, StepContext
from fleetx.parts.pipeline import device_guard, schedules
from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.part import Names, Part, settings
from fleetx.strategy.stage import Fact, Stage, at

LONGEST = 16  # ranks in a pipeline that `auto` would make


@settings
class Pipeline(Part):
    """Cut the model into stages on different ranks, and the batch into micro-batches that flow through them.

    loss = mean over the micro-batches, so one step equals one step on the whole batch, to rounding. Rank r has stage
    r mod S of pipeline r div S; pipelines are replicas, between which gradients are reduced.
    Neutral: one rank and one micro-batch. References: Huang et al. 2019, arXiv 1811.06965 (F-then-B); Narayanan et al.
    2021, arXiv 2104.04473 (1F1B); Qi et al. 2023, arXiv 2401.10241 (zero bubble). The schedules are torch's own.
    """

    micro_batch: Annotated[int, Field(ge=1)] = 1
    """The number of micro-batches in a batch."""
    accumulate_steps: Annotated[int, Field(ge=1)] = 1
    """The later name of `micro_batch`."""
    micro_batch_size: Annotated[int, Field(ge=1)] = 1
    """Samples in a micro-batch, instead of their number or beside it. 1: not said."""
    schedule_mode: str = "1F1B"
    """The order of forwards and backwards: 1F1B, F-then-B, or one of torch's by its name."""
    stages: Names = Field(default_factory=list)
    """Names of the modules with which the stages after the first begin; device_guard says the same. Else: balanced."""
    degree: Annotated[int, Field(ge=1)] | None = None
    """Ranks in a pipeline; by default as many as there are stages to fill, or all ranks."""
    p2p_cache_shape: bool = True
    """In Paddle: send the shapes once only."""
    enable_partial_send_recv: bool = True
    """In Paddle: let ranks of tensor parallelism send parts."""

    no_meaning: ClassVar[dict[str, str]] = {
        "p2p_cache_shape": "shapes are known on both sides and never sent",
        "enable_partial_send_recv": "there is no tensor parallelism",
    }
    divides: ClassVar[bool] = True
    neutral: ClassVar[dict[str, int]] = {"micro_batch": 1, "degree": 1}
    costs: ClassVar[str] = "time: ranks wait while the pipeline fills and drains; network: what crosses the borders"

    # --- what cannot be ---------------------------------------------------------------------------
    def problems(self) -> Iterator[str]:
        if self.schedule_mode not in schedules.MODES:
            near = difflib.get_close_matches(self.schedule_mode, schedules.MODES, n=1, cutoff=0.3)
            hint = f"did you mean {near[0]!r}? " if near else ""
            yield f"schedule_mode = {self.schedule_mode!r}: {hint}There are {', '.join(schedules.MODES)}"
        if 1 < self.micro_batch != self.accumulate_steps > 1:
            yield (
                f"micro_batch = {self.micro_batch} and accumulate_steps = {self.accumulate_steps} both mean the number "
                "of micro-batches: keep one"
            )
        if len(set(self.stages)) != len(self.stages):
            yield f"stages names {next(n for n in self.stages if self.stages.count(n) > 1)!r} twice"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        if self.schedule_mode not in schedules.MODES:
            return
        names = dict(named_modules(model))
        for name in self.stages:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
                hint = f": did you mean {', '.join(near)}?" if near else f". The first are {', '.join(list(names)[:5])}"
                yield f"pipeline_configs['stages']: the model has no module {name!r}{hint}"
            elif not has_forward(names[name]):
                yield f"pipeline_configs['stages']: {name!r} has no forward of its own: name a module inside of it"
        if self.stages and device_guard.placements(model):
            yield "pipeline_configs['stages'] and device_guard both say where stages begin: keep one"
        if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
            yield (
                "pipeline: the model recomputes by itself (gradient_checkpointing), and would run modules again whose "
                "inputs are on other ranks: call model.gradient_checkpointing_disable(), and set strategy.recompute"
            )
        yield from device_guard.problems(model)
        yield from schedules.problems(self._declared(model), self.degree, self.schedule_mode, world.size)

    def _declared(self, model: nn.Module) -> int | None:
        """The number of stages, where the user said it."""
        if self.stages:
            return len(self.stages) + 1
        placed = device_guard.placements(model)
        return max(placed.values()) + 1 if placed else None

    def span(self, model: nn.Module, world: World) -> int:
        return schedules.ranks(self._declared(model), self.degree, self.schedule_mode, world.size)

    @property
    def number(self) -> int:
        return max(self.micro_batch, self.accumulate_steps)

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        for degree in range(2, min(cluster.ranks, LONGEST) + 1):
            if cluster.ranks % degree == 0 and cluster.global_batch:
                yield from (Offer({"degree": degree, "accumulate_steps": n * degree}) for n in (1, 2, 4))

    def cost(self, terms: CostTerms) -> None:
        declared = len(self.stages) + 1 if self.stages else None
        terms.stages = schedules.ranks(declared, self.degree, self.schedule_mode, terms.cluster.ranks)
        terms.micro_batches, terms.after_backward = self.number, True

    # --- acts -------------------------------------------------------------------------------------
    @at(Stage.MODEL, makes={Fact.STAGED, Fact.SPREAD})
    def cut(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """give each rank some stages of the model, when the first batch has shown how it flows"""
        from fleetx.parts.pipeline.runtime import Pipe  # torch's pipelining takes a second to import

        ranks = self.span(model, ctx.world)
        declared = self._declared(model) or ranks * schedules.per_rank(self.schedule_mode)
        pipe = ctx.notes["pipe"] = Pipe(self, declared, ranks, ctx)
        ctx.on_release(pipe.release)
        return model

    @at(Stage.GRADIENT, needs={Fact.SPREAD}, ends={Fact.SPREAD})
    def tie(self, grads: list[Tensor], ctx: StepContext) -> None:
        """add up the gradients of weights that several stages use, so that they stay equal"""
        ctx.notes["pipe"].tie()

    @at(Stage.SCHEDULE, bars={Fact.PARTED})
    def run(self, batch: Any, ctx: StepContext) -> Tensor:
        """send the micro-batches through the stages, forwards and backwards"""
        loss: Tensor = ctx.notes["pipe"].step(batch)
        return loss

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is not None and "pipe" in ctx.notes:
            yield from ctx.notes["pipe"].remarks()
