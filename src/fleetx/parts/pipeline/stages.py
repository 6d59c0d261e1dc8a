"""Runs the stages of this rank in one of torch's own schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from fleetx.base import seams
from fleetx.base.seams import FakeTensor, pytree
from fleetx.base.trees import map_tensors, tensors_of
from fleetx.comm.session import current
from fleetx.comm.world import World
from fleetx.engine.context import StepInput
from fleetx.errors import UsageError
from fleetx.parts.pipeline import schedules
from fleetx.parts.pipeline.stage_params import StageParams
from fleetx.parts.pipeline.trace import Argument, Interceptor, Trace, received


class _StageEnd(Exception):  # noqa: N818  not an error; not a BaseException, so that torch runs its hooks
    """The forward has reached the next stage."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__("the next stage")
        self.tensors = tensors


class StageForward(Interceptor):
    """One stage of the forward of one micro-batch."""

    def __init__(self, params: StageParams, trace: Trace, stage: int, inputs: Sequence[Tensor]):
        super().__init__(params.stage_map)
        self._trace, self._mine, self._inputs = trace, stage, inputs
        self._calls: Counter[str] = Counter()
        self._modules_rng: list[Tensor] = []

    def run(self, forward: Callable[[Interceptor], Tensor], seed: int) -> tuple[Tensor, ...] | Tensor:
        """What the stage sends, or the loss. seed: for code between modules, so that all stages draw the same."""
        self._modules_rng = _rng()  # modules continue with this rank's own random numbers
        _seed(seed)
        try:
            loss = forward(self)
        except _StageEnd as end:
            return tuple(end.tensors)
        finally:
            _set_rng(self._modules_rng)
        self.check(loss)
        return loss

    def check(self, loss: Tensor) -> None:
        if isinstance(loss, FakeTensor):
            raise UsageError(
                "pipeline: the loss reads an output of an earlier stage, which the last stage does not have: pass it "
                "to the module that computes the loss, or begin the last stage earlier"
            )

    def cross(self, boundary: int, given: list[Tensor]) -> None:
        positions = self._trace.boundaries[boundary].positions
        if boundary + 1 == self._mine:
            for position, t in zip(positions, self._inputs, strict=True):
                self.replace(given[position], received(t))
        elif boundary == self._mine:
            raise _StageEnd([_to_send(self.current(given[position])) for position in positions])

    def call(self, name: str, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = self._calls[name]
        self._calls[name] += 1
        if number >= len(self._trace.outputs[name]):
            raise UsageError(
                f"pipeline: the forward calls {name!r} more often than before with a batch of this kind, but {_ASSUMED}"
            )
        traced = self._trace.outputs[name][number]
        if self.stage_map.stages[name] < self._mine:
            if isinstance(traced, Tensor):
                return traced
            given = tensors_of((args, kwargs))
            return map_tensors(
                lambda v: given[v.position] if isinstance(v, Argument) else v, traced, kind=(Tensor, Argument)
            )
        between = _rng()
        _set_rng(self._modules_rng)
        try:
            out = inner(*args, **kwargs)
        finally:
            self._modules_rng = _rng()
            _set_rng(between)
        if not isinstance(out, Tensor) and _constants(out) != _constants(traced):
            raise UsageError(
                f"pipeline: {name!r} returned {_constants(out)} next to its tensors, but {_constants(traced)} before, "
                f"and {_ASSUMED}: return a tensor instead"
            )
        return out


_ASSUMED = "stages that skip this module assume that it does the same every time"


def _to_send(t: Tensor) -> Tensor:
    """Make it contiguous, and not a view, which torch could not detach in place."""
    t = t.contiguous()
    return t.clone() if seams.is_view(t) or t.is_leaf else t


def _constants(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, int | float | str)]


def _rng() -> list[Tensor]:
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cuda]


def _set_rng(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def _seed(seed: int) -> None:
    """Seed the generators of `_rng`. `torch.manual_seed` would format a stack trace where CUDA is not in use."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


class StageModule(nn.Module):
    """What torch sees as the module of a stage. Its parameters are those of the stage."""

    def __init__(self, run: Callable[[int, tuple[Tensor, ...], int], Any], stage: int, params: list[nn.Parameter]):
        super().__init__()
        self._run, self._stage, self._held = run, stage, params

    def forward(self, *inputs: Tensor, micro_batch: int) -> Any:
        return self._run(self._stage, inputs, micro_batch)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self._held)


class TimedStage(PipelineStage):
    """Notes what it computes and when, for the record of the run."""

    actions: list[tuple[str, Any, Any]]  # name, start, end

    @contextmanager
    def _timed(self, letter: str, number: int) -> Iterator[None]:
        recorder = current().recorder
        if recorder is None:
            yield
            return
        start = recorder.now()
        yield
        self.actions.append((f"{letter}{number}/{self.stage_index}", start, recorder.now()))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed("B" if kwargs.get("full_backward", True) else "I", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed("W", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class ScheduleRunner:
    """A schedule for batches of one shape."""

    def __init__(
        self, params: StageParams, trace: Trace, group: World, mode: str, number: int,
        forward: Callable[[StepInput, Interceptor], Tensor], seed: Callable[[int], int], *, train: bool,
    ):  # fmt: skip
        """number: of micro-batches. forward: computes the loss. seed: for the code between modules, by micro-batch."""
        self._params, self.trace, self._number, self._train = params, trace, number, train
        self._forward, self._seed = forward, seed
        self._batches: list[StepInput] = []
        self.losses: list[Tensor] = []
        mine = schedules.stages_of(group.rank, group.size, params.stage_map.number, mode)
        self._stages = [self._stage(stage, group) for stage in mine]
        name, per_rank = schedules.MODES[mode]
        self.schedule = getattr(torch_schedules, name)(
            self._stages[0] if per_rank == schedules.SINGLE else self._stages, number,
            loss_fn=(lambda out, _: out) if train else None, scale_grads=False,
        )  # fmt: skip

    def _stage(self, stage: int, group: World) -> TimedStage:
        boundaries, stages = self.trace.boundaries, self._params.stage_map.number
        loss = torch.empty((), device="meta", requires_grad=self._train)
        return TimedStage(
            StageModule(self._run, stage, self._params.of(stage)), stage, stages, group.device,
            input_args=tuple(boundaries[stage - 1].likes) if stage else (),
            output_args=tuple(boundaries[stage].likes) if stage < stages - 1 else loss,
            group=group.members,
        )  # fmt: skip

    def _run(self, stage: int, inputs: tuple[Tensor, ...], micro_batch: int) -> Any:
        batch = self._batches[micro_batch]
        running = StageForward(self._params, self.trace, stage, inputs)
        out = running.run(partial(self._forward, batch), self._seed(micro_batch))
        if isinstance(out, tuple):
            return out
        self.losses.append(out.detach())
        return out * (batch.factor / self._number)

    def step(self, batches: list[StepInput]) -> None:
        """Forward and backward of all micro-batches."""
        self._batches, self.losses = batches, []
        recorder = current().recorder
        start = recorder.now() if recorder is not None else None
        actions: list[tuple[str, Any, Any]] = []
        for stage in self._stages:
            stage.actions = actions
            stage.has_backward = self._train
            stage.clear_runtime_states()
        numbers = [{"micro_batch": i} for i in range(self._number)]
        try:
            seams.step_microbatches(
                self.schedule, [()] * self._number, numbers, [None] * self._number, None, return_outputs=False
            )
            if recorder is not None:
                recorder.ran(start, actions)
        except RuntimeError as error:
            raise error.__cause__ or error from None
        finally:
            self._batches = []
            for stage in self._stages:
                stage.clear_runtime_states()
