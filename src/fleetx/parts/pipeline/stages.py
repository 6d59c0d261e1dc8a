"""One stage of a forward, and torch's own schedules over the stages of this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils import _pytree as pytree

from fleetx.base.trees import map_tensors, tensors_of
from fleetx.comm.world import World
from fleetx.engine.context import StepInput
from fleetx.errors import UsageError
from fleetx.parts.pipeline import schedules as modes
from fleetx.parts.pipeline.trace import Given, Survey, Units, Visitor, received


class Reached(Exception):  # noqa: N818  it is how a stage ends; not a BaseException, because torch must run the hooks
    """The forward has come to the next stage."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__("the next stage")
        self.tensors = tensors


class Pass(Visitor):
    """One stage of the forward of one micro-batch."""

    def __init__(self, units: Units, survey: Survey, stage: int, received: Sequence[Tensor]):
        super().__init__(units)
        self._survey, self._mine, self._received = survey, stage, received
        self._calls: Counter[str] = Counter()
        self._own: list[Tensor] = []  # random numbers: where the modules of this rank have got to

    @contextmanager
    def drawing(self, seed: int) -> Iterator[None]:
        """Code between modules draws the same numbers in all stages; modules go on with those of this rank."""
        self._own = _random()
        torch.manual_seed(seed)
        try:
            yield
        finally:
            _draw_from(self._own)

    def cross(self, border: int, given: list[Tensor]) -> None:
        positions = self._survey.borders[border].positions
        if border + 1 == self._mine:
            for position, t in zip(positions, self._received, strict=True):
                self.replace(given[position], received(t))
        elif border == self._mine:
            raise Reached([self._ready(self.now(given[position])) for position in positions])

    def call(self, name: str, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = self._calls[name]
        self._calls[name] += 1
        if number >= len(self._survey.outputs[name]):
            raise UsageError(
                f"pipeline: the forward calls {name!r} more often than before with such a batch, and {_SAME}"
            )
        shown = self._survey.outputs[name][number]
        if self.units.stages[name] < self._mine:
            if isinstance(shown, Tensor):
                return shown
            given = tensors_of((args, kwargs))
            return map_tensors(lambda v: given[v.position] if isinstance(v, Given) else v, shown, kind=(Tensor, Given))
        between = _random()
        _draw_from(self._own)
        try:
            out = inner(*args, **kwargs)
        finally:
            self._own = _random()
            _draw_from(between)
        if not isinstance(out, Tensor) and _plain(out) != _plain(shown):
            raise UsageError(
                f"pipeline: {name!r} returned {_plain(out)} besides tensors, and {_plain(shown)} before, and {_SAME}: "
                "return a tensor"
            )
        return out

    def _ready(self, t: Tensor) -> Tensor:
        """To be sent: dense, and no view, which torch could not take out of the graph in place."""
        t = t.contiguous()
        return t.clone() if t._is_view() or t.is_leaf else t


_SAME = "stages that skip it go by what it did before"


def _plain(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, int | float | str)]


def _random() -> list[Tensor]:
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cuda]


def _draw_from(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


class Stage(nn.Module):
    """What torch takes for the module of a stage. Its parameters are those of the stage."""

    def __init__(self, run: Callable[[int, tuple[Tensor, ...], int], Any], number: int, params: list[nn.Parameter]):
        super().__init__()
        self._run, self._number, self._held = run, number, params

    def forward(self, *received: Tensor, micro: int) -> Any:
        return self._run(self._number, received, micro)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self._held)


class Runner:
    """A schedule for batches of one shape."""

    def __init__(
        self,
        survey: Survey,
        units: Units,
        mode: str,
        number: int,
        group: World,
        params: Callable[[int], list[nn.Parameter]],
        forward: Callable[[Visitor, StepInput], Tensor],
        seed: Callable[[int], int],
        *,
        train: bool,
    ):
        self._survey, self._units, self._forward, self._number, self._train = survey, units, forward, number, train
        self._seed = seed
        self._mine = modes.stages_of(group.rank, group.size, units.number, mode)
        self._batches: list[StepInput] = []
        self.losses: list[Tensor] = []
        self._stages = [self._stage(s, group, params(s)) for s in self._mine]
        name, per_rank = modes.MODES[mode]
        self.schedule = getattr(schedules, name)(
            self._stages[0] if per_rank == modes.SINGLE else self._stages, number,
            loss_fn=(lambda out, _: out) if train else None, scale_grads=False,
        )  # fmt: skip

    def _stage(self, number: int, group: World, params: list[nn.Parameter]) -> PipelineStage:
        borders, last = self._survey.borders, self._units.number - 1
        loss = torch.empty((), device="meta", requires_grad=self._train)
        return PipelineStage(
            Stage(self._run, number, params), number, self._units.number, group.device,
            input_args=tuple(borders[number - 1].likes) if number else (),
            output_args=tuple(borders[number].likes) if number < last else loss,
            group=group.members,
        )  # fmt: skip

    def _run(self, stage: int, received: tuple[Tensor, ...], micro: int) -> Any:
        batch, going = self._batches[micro], Pass(self._units, self._survey, stage, received)
        try:
            with going.drawing(self._seed(micro)):
                loss = self._forward(going, batch)
        except Reached as reached:
            return tuple(reached.tensors)
        if isinstance(loss, FakeTensor):
            raise UsageError(
                "pipeline: the loss reads what an earlier stage returned, which the last stage has not: let the module "
                "that makes the loss be handed it, or let that stage begin earlier"
            )
        self.losses.append(loss.detach())
        return loss * (batch.factor / self._number)

    def step(self, batches: list[StepInput]) -> None:
        """All micro-batches, forwards and backwards."""
        self._batches, self.losses = batches, []
        for stage in self._stages:
            stage.has_backward = self._train
            stage.clear_runtime_states()
        numbers = [{"micro": i} for i in range(self._number)]
        try:
            self.schedule._step_microbatches(
                [()] * self._number, numbers, [None] * self._number, None, return_outputs=False
            )
        except RuntimeError as error:
            raise error.__cause__ or error from None
        finally:
            self._batches = []
            for stage in self._stages:
                stage.clear_runtime_states()
