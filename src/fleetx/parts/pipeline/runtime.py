"""A pipeline as one rank sees it: the cut at the first batch, then one schedule for each shape of batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fleetx.base.trees import tensors_of
from fleetx.engine.context import SetupContext, StepInput
from fleetx.errors import StrategyError, UsageError
from fleetx.parts.pipeline import balance, device_guard, microbatch, schedules, timeline, trace
from fleetx.parts.pipeline.gather import gather
from fleetx.parts.pipeline.stage_params import Cut, buffers_elsewhere, own_buffers
from fleetx.parts.pipeline.stages import Runner

if TYPE_CHECKING:
    from fleetx.parts.pipeline import Pipeline


KEPT = 8  # shapes of batches for which a schedule is kept, with what it receives into


class Pipe:
    """Of one model."""

    def __init__(self, part: Pipeline, stages: int, ranks: int, ctx: SetupContext):
        world = ctx.world
        self._part, self._stages, self._ctx = part, stages, ctx
        self.group = world.split([list(range(first, first + ranks)) for first in range(0, world.size, ranks)])
        ctx.divide(self.group)
        world.broadcast([t.detach() for t in (*ctx.model.parameters(), *ctx.model.buffers())])
        self.cut: Cut | None = None
        self._runners: dict[Any, Runner] = {}
        self._last: Runner | None = None
        self._seed = self.group.broadcast_json(str(torch.initial_seed())).encode()

    @property
    def _mine(self) -> list[int]:
        return schedules.stages_of(self.group.rank, self.group.size, self._stages, self._part.schedule_mode)

    def release(self) -> None:
        """Every rank gets the whole model and the whole optimizer state back."""
        if self.cut is not None:
            gather(self._ctx.model, self._ctx.optimizer, self.group, self._ctx.device, self._ctx.absent)
        self._runners, self._last, self.cut = {}, None, None

    # --- a step -----------------------------------------------------------------------------------
    def step(self, batch: StepInput) -> Tensor:
        """The mean loss over the micro-batches, on every rank."""
        size = microbatch.size_of(batch.inputs, batch.target)
        least, multiple = schedules.least(self._part.schedule_mode, self.group.size, self._stages)
        if self.group.size == 1:
            least, multiple = 1, 1
        number = microbatch.count(size, self._part.number, self._part.micro_batch_size, self._stages, least, multiple)
        inputs, targets = (microbatch.split(value, size, number) for value in (batch.inputs, batch.target))
        batches = [replace(batch, inputs=x, target=y) for x, y in zip(inputs, targets, strict=True)]
        if self.group.size == 1:
            return self._alone(batches)
        self._check_same(batch)
        if self.cut is None:
            self._cut(batches[0])
        runner = self._last = self._runner(batches[0], number)
        runner.step(batches)
        loss = torch.zeros(1, dtype=torch.float64, device=self.group.device)
        if runner.losses:
            loss += torch.stack(runner.losses).double().mean()
        self.group.sum(loss)  # the last stage has it, the others nothing
        return loss.float().reshape(())

    def _alone(self, batches: list[StepInput]) -> Tensor:
        """One rank has all stages: the micro-batches one after the other."""
        losses = []
        for batch in batches:
            loss = batch.loss(self._ctx.model)
            losses.append(loss.detach())
            if torch.is_grad_enabled():
                (loss * (batch.factor / len(batches))).backward()
        return torch.stack(losses).mean()

    def _check_same(self, batch: StepInput) -> None:
        """Each stage takes from the batch what it needs, so the ranks of a pipeline must have the same one."""
        mine = microbatch.digest((batch.inputs, batch.target), (batch.weight, _others(batch)), self.group.device)
        found = self.group.gather(mine).flatten().tolist()
        if len(set(found)) > 1:
            first = self._ctx.world.rank - self.group.rank
            ranks = f"{first} to {first + self.group.size - 1}"
            raise UsageError(
                f"ranks {ranks} are one pipeline and were given different batches, or weights of them: every stage "
                "needs the same. Let the sampler use fleet.replica_index() of fleet.replica_num() instead of ranks, "
                "and one seed"
            )

    # --- at the first batch -----------------------------------------------------------------------
    def _cut(self, batch: StepInput) -> None:
        model = self._ctx.model

        def call() -> None:  # for real: the whole model is still here
            with torch.no_grad(), torch.random.fork_rng(devices=[]), own_buffers(model):
                _run(batch, model)

        if self._part.stages:
            units = trace.units(model, self._part.stages, call)
        elif placed := device_guard.placements(model):
            units = trace.units(model, placed.get, call)
            trace.check_placement(units, placed, self._stages)
        else:
            units = self._balanced(batch, call)
        mode = self._part.schedule_mode
        ranks = lambda stage: schedules.rank_of(stage, self.group.size, self._stages, mode)  # noqa: E731
        self.cut = Cut(model, units, ranks, self.group)
        self._survey(batch)  # what cannot be is said before anything is dropped
        self.cut.drop(self._ctx.optimizer)
        elsewhere = [name for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta]
        self._ctx.hold(self.cut.counts, [*elsewhere, *buffers_elsewhere(model, units, self._mine)])

    def _balanced(self, batch: StepInput, call: Callable[[], Any]) -> trace.Units:
        """The first rank measures while the others wait; all of them cut where it says."""
        found: dict[str, Any] = {}
        if self._ctx.world.rank == 0:
            try:
                found = {"starts": balance.starts(self._ctx, batch, self._stages)}
            except Exception as error:  # the others wait for an answer
                found = {"problem": str(error) if isinstance(error, StrategyError) else _unprobed(error)}
        found = self._ctx.world.broadcast_json(found)
        if "problem" in found:
            raise StrategyError(found["problem"])
        return trace.units(self._ctx.model, found["starts"], call)

    # --- one schedule for each shape of batch -----------------------------------------------------
    def _runner(self, batch: StepInput, number: int) -> Runner:
        train = torch.is_grad_enabled()
        like = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_of((batch.inputs, batch.target))]
        key = (*like, _others(batch), number, train, tuple(m.training for m in self._ctx.model.modules()))
        if key in self._runners:
            self._runners[key] = self._runners.pop(key)  # the last one used is the last to go
        else:
            assert self.cut is not None
            if len(self._runners) == KEPT:
                self._runners.pop(next(iter(self._runners)))
            self._runners[key] = Runner(
                self._survey(batch), self.cut.units, self._part.schedule_mode, number, self.group,
                self.cut.params, self._forward, self._noise, train=train,
            )  # fmt: skip
        return self._runners[key]

    def _noise(self, micro_batch: int) -> int:
        """The seed of what code between modules draws: the same in all stages, another for each micro-batch."""
        return zlib.crc32(repr((self._seed, self._ctx.clock, micro_batch)).encode())

    def _survey(self, batch: StepInput) -> trace.Survey:
        assert self.cut is not None
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            return trace.borders(self.cut.units, self._ctx.device, lambda v: self._forward(v, batch, _run))

    def _forward(self, visitor: trace.Visitor, batch: StepInput, call: Any = StepInput.loss) -> Tensor:
        assert self.cut is not None
        self.cut.visitor = visitor
        try:
            loss: Tensor = call(batch, self._ctx.model)
            return loss
        finally:
            self.cut.visitor = None

    def tie(self) -> None:
        if self.cut is not None:
            self.cut.tie()

    # --- explain ----------------------------------------------------------------------------------
    def remarks(self) -> Iterator[str]:
        replicas = self._ctx.world.size // self.group.size
        yield (
            f"{self._stages} stages on {self.group.size} ranks, {replicas} such pipeline{'s' if replicas > 1 else ''}; "
            f"this is rank {self.group.rank} of one, with stage {' and '.join(map(str, self._mine))}"
        )
        if self.cut is None:
            yield "the model is cut at the first batch"
            return
        yield f"stages begin with {', '.join(self.cut.units.starts)}"
        for world, params in self.cut.shared:
            names = [n for n, p in self._ctx.model.named_parameters() if any(p is q for q in params)]
            yield f"{', '.join(names)} is held by {world.size} ranks, which add up its gradients"
        if self._last is not None:
            yield from timeline.draw(self._last.schedule, self.group.size)


def _unprobed(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return (
        f"pipeline: the modules of this model could not be timed alone ({type(error).__name__}: {first}), so the "
        "stages cannot be balanced: say with `stages` or device_guard where they begin"
    )


def _run(batch: StepInput, model: Any) -> Any:
    """The forward without the loss, which may be anything, and is for real batches alone."""
    args, kwargs = batch.arguments
    return model(*args, **kwargs)


def _others(batch: StepInput) -> str:
    """What else the way through a model depends on."""
    leaves = pytree.tree_leaves((batch.inputs, batch.target))
    return repr([leaf for leaf in leaves if isinstance(leaf, int | float | str | None)])
