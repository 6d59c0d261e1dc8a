"""A pipeline as one rank sees it: the model is cut at the first batch; then there is one schedule per batch shape."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor

from fleetx.base import seams
from fleetx.base.trees import tensors_of
from fleetx.engine.buffers import ModelBuffers
from fleetx.engine.context import SetupContext, StepContext, StepInput
from fleetx.errors import StrategyError, UsageError
from fleetx.measure.fake_step import constants_of, shapes_of
from fleetx.parts.pipeline import device_guard, memory, microbatch, schedules, timeline
from fleetx.parts.pipeline.cut_points import balanced_starts
from fleetx.parts.pipeline.stage_params import StageParams, absent_names, copied_buffers, gather
from fleetx.parts.pipeline.stages import ScheduleRunner
from fleetx.parts.pipeline.trace import Interceptor, StageMap, Trace, check_placement, map_stages, trace

if TYPE_CHECKING:
    from fleetx.parts.pipeline import Pipeline

Value = TypeVar("Value")
MAX_RUNNERS = 8  # batch shapes whose schedules are kept, with their receive buffers
MAX_TRACES = 512  # batch shapes whose traces are kept: they have no data, and making one takes as long as several steps


class Runtime:
    def __init__(self, part: Pipeline, stages: int, ranks: int, ctx: SetupContext):
        world = ctx.world
        self._part, self._stages, self._ctx = part, stages, ctx
        self.group = world.split([list(range(first, first + ranks)) for first in range(0, world.size, ranks)])
        ctx.divide(self.group)
        world.broadcast([p.detach() for p in ctx.model.parameters()])
        ModelBuffers(ctx.model).send(world)
        self._params: StageParams | None = None  # until the model is cut
        self._runners = Recent[ScheduleRunner](MAX_RUNNERS)
        self._traces = Recent[Trace](MAX_TRACES)
        self._last: ScheduleRunner | None = None
        self._look: Any = None  # shapes and constants of the last batch
        self._differ: Tensor | None = None  # did batches differ between ranks since the last update? Not read yet
        self._seed = self.group.broadcast_json(torch.initial_seed())

    @property
    def _mine(self) -> list[int]:
        return schedules.stages_of(self.group.rank, self.group.size, self._stages, self._part.schedule_mode)

    def release(self) -> None:
        """Give every rank the whole model and optimizer state again."""
        if self._params is not None:
            gather(self._ctx.model, self._ctx.optimizer, self.group, self._ctx.device, self._ctx.absent)
        self._last = self._params = None
        self._runners.clear()
        self._traces.clear()

    # --- a step -----------------------------------------------------------------------------------
    def step(self, batch: StepInput) -> Tensor:
        """The mean loss over the micro-batches, on every rank."""
        size = microbatch.size_of(batch.inputs, batch.target)
        least, multiple = schedules.least(self._part.schedule_mode, self.group.size, self._stages)
        number = microbatch.count(size, self._part.number, self._part.micro_batch_size, self._stages, least, multiple)
        inputs, targets = (microbatch.split(value, size, number) for value in (batch.inputs, batch.target))
        batches = [replace(batch, inputs=x, target=y) for x, y in zip(inputs, targets, strict=True)]
        tell = self._ctx.notes.pop("predict", None) if torch.is_grad_enabled() else None
        if self.group.size == 1:
            if tell is not None:
                tell(lambda merged: memory.running_alone(self._ctx.model, batches[0]))
            return self._run_alone(batches)
        self._check_same(batch)
        params = self._params or self._cut(batches[0])
        runner = self._last = self._runner(params, batches[0], number)
        if tell is not None:
            tell(partial(self._running, params, runner, batches))
        runner.step(batches)
        loss = torch.zeros(1, dtype=torch.float64, device=self.group.device)
        if runner.losses:
            loss += torch.stack(runner.losses).double().mean()
        self.group.sum(loss)  # only the rank of the last stage contributes
        return loss.float().reshape(())

    def _running(self, params: StageParams, runner: ScheduleRunner, batches: list[StepInput], merged: bool) -> int:
        """The predicted peak of forward and backward."""
        order = timeline.order_of(runner.schedule, self.group.rank, self.group.size)
        forward = partial(self._intercepted, params, StepInput.loss)
        model, device = self._ctx.model, self._ctx.device
        return memory.running(model, params, runner.trace, order, batches, forward, device, merged=merged)

    def _run_alone(self, batches: list[StepInput]) -> Tensor:
        """One rank has all stages: run the micro-batches one after another."""
        losses = []
        for batch in batches:
            loss = batch.loss(self._ctx.model)
            losses.append(loss.detach())
            if torch.is_grad_enabled():
                (loss * (batch.factor / len(batches))).backward()
        return torch.stack(losses).mean()

    def _check_same(self, batch: StepInput) -> None:
        """Raise if the ranks of a pipeline have different batches: each stage takes what it needs from its own.

        On an accelerator, the result for a batch that looks like the last one is read only at the update, so that the
        host does not wait. Shapes are compared at once, on the hosts: a rank with another schedule would hang.
        """
        value = batch.inputs, batch.target
        look = constants_of(value), [tuple(t.shape) for t in tensors_of(value)]
        if self.group.device.type != "cpu":
            looks = self.group.gather(torch.tensor(zlib.crc32(repr(look).encode()), device="cpu")).tolist()
            self._refuse_if(len(set(looks)) > 1)
        digests = self.group.gather(microbatch.digest(value, (batch.weight, look), self.group.device)).flatten()
        differ = (digests != digests[0]).any().to(torch.float32).view(1)
        known, self._look = look == self._look, look
        if self.group.device.type == "cpu" or not torch.is_grad_enabled() or not known:
            self._refuse_if(bool(differ))
        else:
            self._differ = differ if self._differ is None else self._differ.maximum(differ)

    def _refuse_if(self, differ: bool) -> None:
        if differ:
            first = self._ctx.world.rank - self.group.rank
            raise UsageError(
                f"ranks {first} to {first + self.group.size - 1} form one pipeline, but got different batches or "
                "weights. They need the same ones: give the sampler fleet.replica_num() and fleet.replica_index() "
                "instead of the number of workers and the rank, and use one seed"
            )

    # --- at the first batch -----------------------------------------------------------------------
    def _cut(self, batch: StepInput) -> StageParams:
        model = self._ctx.model

        def call() -> None:  # on real tensors: all stages are still here
            with torch.no_grad(), torch.random.fork_rng(devices=[]), copied_buffers(model), _no_checkpoints():
                _forward(batch, model)

        if self._part.stages:
            stage_map = map_stages(model, self._part.stages, call)
        elif placed := device_guard.placements(model):
            stage_map = map_stages(model, placed.get, call)
            check_placement(stage_map, placed, self._stages)
        else:
            call()  # raises before modules are timed
            stage_map = self._balanced(batch, call)

        def rank_of(stage: int) -> int:
            return schedules.rank_of(stage, self.group.size, self._stages, self._part.schedule_mode)

        params = StageParams(model, stage_map, rank_of, self.group)
        self._traces.clear()  # an earlier cut may have failed after its trace
        self._trace(params, batch)  # raises before anything is dropped
        params.drop_others(self._ctx.optimizer)
        self._ctx.hold(params.counts, list(absent_names(model, stage_map, self._mine)))
        self._params = params
        return params

    def _balanced(self, batch: StepInput, call: Callable[[], Any]) -> StageMap:
        """Rank 0 measures while the others wait; then all ranks cut at the same modules."""
        answer: dict[str, Any] = {}
        if self._ctx.world.rank == 0:
            try:
                answer = {"starts": balanced_starts(self._ctx, batch, self._stages)}
            except Exception as error:  # the others wait for an answer
                answer = {"problem": str(error) if isinstance(error, StrategyError) else _not_timed(error)}
        answer = self._ctx.world.broadcast_json(answer)
        if "problem" in answer:
            raise StrategyError(answer["problem"])
        return map_stages(self._ctx.model, answer["starts"], call)

    # --- one schedule per shape of batch ----------------------------------------------------------
    def _runner(self, params: StageParams, batch: StepInput, number: int) -> ScheduleRunner:
        train = torch.is_grad_enabled()
        return self._runners.get(
            (self._kind(batch), number, train),
            lambda: ScheduleRunner(
                params, self._trace(params, batch), self.group, self._part.schedule_mode, number,
                partial(self._intercepted, params, StepInput.loss), self._random_seed, train=train,
            ),
        )  # fmt: skip

    def _kind(self, batch: StepInput) -> Any:
        """Batches of the same kind have the same trace."""
        value, model, device = (batch.inputs, batch.target), self._ctx.model, self._ctx.device.type
        modes = tuple(m.training for m in model.modules()), tuple(p.requires_grad for p in model.parameters())
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return *shapes_of(value), constants_of(value), modes, autocast

    def _random_seed(self, micro_batch: int) -> int:
        """The seed for code between modules: equal in all stages, different for each micro-batch."""
        return zlib.crc32(repr((self._seed, self._ctx.clock, micro_batch)).encode())

    def _trace(self, params: StageParams, batch: StepInput) -> Trace:
        def make() -> Trace:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                return trace(params.stage_map, self._ctx.device, partial(self._intercepted, params, _forward, batch))

        return self._traces.get(self._kind(batch), make)

    def _intercepted(self, params: StageParams, call: Any, batch: StepInput, interceptor: Interceptor) -> Any:
        params.interceptor = interceptor
        try:
            return call(batch, self._ctx.model)
        finally:
            params.interceptor = None

    def before_update(self, ctx: StepContext) -> None:
        if self._params is not None:
            self._params.sum_shared()
        if self._differ is not None:
            ctx.withhold_if(self._differ, self._refuse_if)
            self._differ = None

    # --- explain ----------------------------------------------------------------------------------
    def remarks(self) -> Iterator[str]:
        replicas = self._ctx.world.size // self.group.size
        yield (
            f"{self._stages} stages on {self.group.size} ranks, in {replicas} pipeline{'s' if replicas > 1 else ''}; "
            f"this is rank {self.group.rank} of its pipeline, with stage {' and '.join(map(str, self._mine))}"
        )
        if self._params is None:
            yield "the model is cut at the first batch"
            return
        yield f"stages begin with {', '.join(self._params.stage_map.starts)}"
        for group, params in self._params.shared:
            names = [n for n, p in self._ctx.model.named_parameters() if any(p is q for q in params)]
            yield f"{', '.join(names)} is held by {group.size} ranks, which add up its gradients"
        if self._last is not None:
            yield from timeline.draw(self._last.schedule, self.group.size)


class Recent(Generic[Value]):
    """Values by key. The least recently used are dropped."""

    def __init__(self, most: int):
        self._most, self._values = most, dict[Any, Value]()

    def get(self, key: Any, make: Callable[[], Value]) -> Value:
        value = self._values.pop(key, None)
        if len(self._values) == self._most:
            del self._values[next(iter(self._values))]  # before a new one takes memory
        self._values[key] = made = make() if value is None else value
        return made

    def clear(self) -> None:
        self._values.clear()


def _not_timed(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return (
        f"pipeline: the modules of this model cannot be timed one by one ({type(error).__name__}: {first}), so the "
        "stages cannot be balanced: set pipeline_configs['stages'] or use device_guard"
    )


def _forward(batch: StepInput, model: Any) -> Any:
    """Call the model without the loss function, which may do anything and only gets real tensors."""
    args, kwargs = batch.arguments
    return model(*args, **kwargs)


@contextmanager
def _no_checkpoints() -> Iterator[None]:
    """Raise if the forward calls torch.utils.checkpoint, which would rerun modules whose inputs are on other ranks."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise StrategyError(
            "pipeline: the model calls torch.utils.checkpoint, which would run modules again whose inputs are on other "
            "ranks: turn that off in the model, and set strategy.recompute"
        )

    with (
        patch.object(torch.utils.checkpoint, seams.CHECKPOINTS, refuse),
        patch.object(torch.utils.checkpoint.CheckpointFunction, "apply", refuse),
    ):
        yield
