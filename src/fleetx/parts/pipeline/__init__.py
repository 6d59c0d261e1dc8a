"""`pipeline`: split the model into stages on several ranks.

schedules.py      the schedules by name, and how many stages, ranks and micro-batches each supports
device_guard.py   stages that the user declares while building the model
trace.py          which modules a forward calls in which stage, and what crosses the boundaries
cut_points.py     the modules that a stage may begin with, and where to cut so that stages take equally long
stage_params.py   what a rank holds after the cut, and how every rank gets the whole model back
runtime.py        the pipeline as one rank sees it
microbatch.py     splits a batch
stages.py         runs the stages of this rank in one of torch's schedules
memory.py         predicts the peak memory of this rank
timeline.py       draws a schedule as text
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.module_names import has_forward, named_modules, no_module, sparse_problem
from fleetx.base.suggest import did_you_mean
from fleetx.comm.world import World
from fleetx.engine.context import SetupContext, StepContext, StepInput
from fleetx.errors import NOT_BUILT
from fleetx.parts.pipeline import device_guard, schedules
from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.effect import Effect, less
from fleetx.strategy.part import NameList, Part, settings
from fleetx.strategy.stage import Fact, Stage, at

MAX_AUTO_DEGREE = 16  # the longest pipeline that `auto` considers


@settings
class Pipeline(Part):
    """Cut the model into stages on different ranks, and the batch into micro-batches that flow through them.

    loss = mean over the micro-batches, so one step equals one step on the whole batch, up to rounding. Rank r has stage
    r mod S of pipeline r div S; the pipelines are replicas, and gradients are reduced between them.
    Neutral: one rank and one micro-batch. References: Huang et al. 2019, arXiv 1811.06965 (F-then-B); Narayanan et al.
    2021, arXiv 2104.04473 (1F1B); Qi et al. 2023, arXiv 2401.10241 (zero bubble). The schedules are torch's own.
    """

    micro_batch: Annotated[int, Field(ge=1)] = 1
    """The number of micro-batches per batch."""
    accumulate_steps: Annotated[int, Field(ge=1)] = 1
    """Paddle's later name for `micro_batch`."""
    micro_batch_size: Annotated[int, Field(ge=1)] = 1
    """Samples per micro-batch, instead of or in addition to their number. 1: not set."""
    schedule_mode: str = "1F1B"
    """The order of forwards and backwards: 1F1B, F-then-B, or the name of one of torch's schedules."""
    stages: NameList = Field(default_factory=list)
    """The first module of each stage but the first. Default: as set by device_guard, or balanced."""
    degree: Annotated[int, Field(ge=1)] | None = None
    """Ranks per pipeline. Default: as many as the stages need, or all ranks."""
    p2p_cache_shape: bool = True
    """In Paddle: send shapes only once."""
    enable_partial_send_recv: bool = True
    """In Paddle: each tensor-parallel rank sends only a part."""

    no_meaning: ClassVar[dict[str, str]] = {
        "p2p_cache_shape": "both sides know the shapes, which are never sent",
        "enable_partial_send_recv": f"tensor parallelism {NOT_BUILT}",
    }
    means_unset: ClassVar[dict[str, tuple[int, str]]] = {
        "micro_batch_size": (1, "1 is Paddle's default and means not set: for micro-batches of 1, set micro_batch"),
    }
    divides: ClassVar[bool] = True
    neutral: ClassVar[dict[str, int]] = {"micro_batch": 1, "degree": 1}
    effect: ClassVar[Effect] = less("bytes_held", "a rank holds fewer parameters", than=0.9)
    example: ClassVar[dict[str, Any]] = {"stages": ["blocks.2"], "micro_batch": 2}
    costs: ClassVar[str] = "time: ranks wait while the pipeline fills and drains; network: what crosses the boundaries"

    # --- checks -----------------------------------------------------------------------------------
    def problems(self) -> Iterator[str]:
        if self.schedule_mode not in schedules.MODES:
            known = f"use one of {', '.join(schedules.MODES)}"
            hint = did_you_mean(self.schedule_mode, schedules.MODES, cutoff=0.3)
            yield f"schedule_mode = {self.schedule_mode!r} is unknown: {hint}{' Or ' if hint else ''}{known}"
        if 1 < self.micro_batch != self.accumulate_steps > 1:
            yield (
                f"micro_batch = {self.micro_batch} and accumulate_steps = {self.accumulate_steps} both set the number "
                "of micro-batches: keep one"
            )
        if len(set(self.stages)) != len(self.stages):
            twice = next(n for n in self.stages if self.stages.count(n) > 1)
            yield f"stages names {twice!r} twice: name each module once"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        if self.schedule_mode not in schedules.MODES:
            return
        modules = dict(named_modules(model))
        for name in self.stages:
            if name not in modules:
                yield f"pipeline_configs['stages']: {no_module(name, modules, otherwise='turn pipeline off')}"
            elif not has_forward(modules[name]):
                yield f"pipeline_configs['stages']: {name!r} has no forward of its own: name a module inside it"
        if self.stages and device_guard.placements(model):
            yield "pipeline_configs['stages'] and device_guard both set where stages begin: keep one"
        if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
            yield (
                "pipeline: the model recomputes on its own (gradient_checkpointing), and would rerun modules whose "
                "inputs are on other ranks: call model.gradient_checkpointing_disable(), and set strategy.recompute"
            )
        yield from sparse_problem("pipeline", model)
        yield from device_guard.problems(model)
        yield from schedules.problems(self._declared(model), self.degree, self.schedule_mode, world.size)

    def _declared(self, model: nn.Module) -> int | None:
        """The number of stages, if the user set it."""
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
        for degree in range(2, min(cluster.ranks, MAX_AUTO_DEGREE) + 1):
            if cluster.ranks % degree == 0 and cluster.global_batch:
                yield from (Offer({"degree": degree, "accumulate_steps": n * degree}) for n in (1, 2, 4))

    def cost(self, terms: CostTerms) -> None:
        declared = len(self.stages) + 1 if self.stages else None
        terms.stages = schedules.ranks(declared, self.degree, self.schedule_mode, terms.cluster.ranks)
        terms.micro_batches, terms.after_backward = self.number, True

    # --- acts -------------------------------------------------------------------------------------
    @at(Stage.MODEL, makes={Fact.STAGED, Fact.SPREAD})
    def cut(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """give each rank some stages of the model, once the first batch has shown how data flows"""
        from fleetx.parts.pipeline.runtime import Runtime  # torch's pipelining takes a second to import

        ranks = self.span(model, ctx.world)
        stages = self._declared(model) or ranks * schedules.per_rank(self.schedule_mode)
        runtime = ctx.notes["runtime"] = Runtime(self, stages, ranks, ctx)
        ctx.on_release(runtime.release)
        return model

    @at(Stage.GRADIENT, needs={Fact.SPREAD}, ends={Fact.SPREAD})
    def tie(self, grads: list[Tensor], ctx: StepContext) -> None:
        """add up the gradients of weights that several stages use, so that their copies stay equal"""
        ctx.notes["runtime"].before_update(ctx)

    @at(Stage.SCHEDULE, unbuilt={Fact.PARTED})
    def run(self, batch: StepInput, ctx: StepContext) -> Tensor:
        """send the micro-batches through the stages, forward and backward"""
        loss: Tensor = ctx.notes["runtime"].step(batch)
        return loss

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is not None and "runtime" in ctx.notes:
            yield from ctx.notes["runtime"].remarks()
