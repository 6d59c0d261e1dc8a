"""Which modules a forward calls in which stage, and what crosses the boundaries between stages.

Every rank runs the whole forward as the user wrote it, for any model. Modules of earlier stages are skipped: the fake
tensors that they returned in the trace take the place of their outputs. What depends on a fake tensor is fake too; what
depends only on the batch (masks, positions) is computed as usual. At the first module of its stage, a rank replaces the
fake tensors among the arguments with those it received; at the first module of the next stage, it sends the
corresponding ones.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fleetx.base.module_names import has_forward, named_modules
from fleetx.base.seams import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    pytree,
    reparametrize_module,
)
from fleetx.base.trees import map_tensors, tensors_of, without_caches
from fleetx.base.wrapping import Layer, wrap
from fleetx.errors import StrategyError


# --- which modules are called in which stage ------------------------------------------------------
@dataclass(frozen=True)
class StageMap:
    """The largest modules that lie within a single stage ("units"). The rest of the forward is code between them."""

    starts: list[str]  # the first modules of all stages but the first
    stages: dict[str, int]  # of each unit

    @property
    def number(self) -> int:
        return len(self.starts) + 1

    def stage_of(self, name: str) -> int | None:
        """The stage of a module. None if it is in several, or in none."""
        while name and name not in self.stages:
            name = name.rpartition(".")[0]
        return self.stages.get(name)


def map_stages(
    model: nn.Module, starts: Sequence[str] | Callable[[str], int | None], call: Callable[[], Any]
) -> StageMap:
    """Map modules to stages. `call` runs a forward; `starts` has module names, or maps a name to its placement."""
    calls: dict[str, list[tuple[int, int]]] = defaultdict(list)
    started: list[str] = []

    def around(name: str, _: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        begins = starts(name) == len(started) + 1 if callable(starts) else name in starts and name not in started
        if begins:
            started.append(name)
        first = len(started)
        args, kwargs = without_caches(args, kwargs)
        out = inner(*args, **kwargs)
        calls[name].append((first, len(started)))
        return out

    undo = [wrap(m, Layer.STAGE, partial(around, name)) for name, m in named_modules(model) if has_forward(m)]
    try:
        call()
    finally:
        for remove in undo:
            remove()
    if not callable(starts) and (unused := sorted(set(starts) - set(started))):
        raise StrategyError(
            f"pipeline_configs['stages']: the forward does not call {', '.join(unused)}, so no stage can begin there: "
            "name modules that it calls"
        )
    found = StageMap(started, {})
    for name, _ in named_modules(model):  # outer modules first
        stages = {stage for pair in calls.get(name, ()) for stage in pair}
        if len(stages) == 1 and found.stage_of(name) is None:
            found.stages[name] = stages.pop()
    return found


def check_placement(found: StageMap, placed: dict[str, int], stages: int) -> None:
    """Raise if the layers are not called in the order of their stages."""
    wrong = next((n for n, stage in placed.items() if found.stage_of(n) not in (None, stage)), None)
    if found.number < stages:
        problem = (
            f"layers are placed on {stages} stages, but in the forward only {found.number} begin one after another"
        )
    elif wrong is not None:
        problem = f"{wrong!r} is placed on stage {placed[wrong]}, but is called in stage {found.stage_of(wrong)}"
    else:
        return
    raise StrategyError(f"device_guard: {problem}: place layers in the order in which they are called")


# --- intercepting calls ---------------------------------------------------------------------------
class Interceptor:
    """Sees every call of a unit, and of a module that begins a stage."""

    def __init__(self, stage_map: StageMap):
        self.stage_map = stage_map
        self.stage = 0  # the one that the forward has reached
        self._replaced: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of a tensor that code between modules holds

    def enter(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if kwargs or not all(isinstance(a, Tensor) for a in args):
            args, kwargs = without_caches(args, kwargs)
        starts = self.stage_map.starts
        if self.stage < len(starts) and name == starts[self.stage]:
            self.cross(self.stage, tensors_of((args, kwargs)))
            self.stage += 1
        if not self._replaced:
            return args, kwargs
        new: tuple[Any, Any] = map_tensors(self.current, (args, kwargs))
        return new

    def cross(self, boundary: int, given: list[Tensor]) -> None:
        raise NotImplementedError

    def call(self, name: str, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def current(self, t: Tensor) -> Tensor:
        return self._replaced.get(id(t), (t, t))[1]

    def replace(self, old: Tensor, new: Tensor) -> None:
        self._replaced[id(old)] = (old, new)  # holds the old one, so that no other tensor gets its id


def received(t: Tensor) -> Tensor:
    """Make it a module's argument: a module may modify the output of another in place, but not a leaf."""
    return t.clone() if t.requires_grad else t


# --- what crosses the boundaries ------------------------------------------------------------------
@dataclass(frozen=True)
class Boundary:
    """What enters a stage: which tensors among the arguments of its first module, and their shapes."""

    positions: list[int]
    likes: list[Tensor]  # on the "meta" device


@dataclass
class Trace:
    """What a forward of one kind of batch does."""

    outputs: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))  # fake, per call of a unit
    boundaries: list[Boundary] = field(default_factory=list)  # boundaries[0]: what enters stage 1


@dataclass(frozen=True)
class Argument:
    """In the output of a unit, stands for an argument that is returned unchanged."""

    position: int


class _CrossedError(Exception):
    """A tensor of an earlier stage was used after the boundary."""


class _StageMode(FakeTensorMode):
    """The mode for the fake tensors of one stage, which must not mix with those of another."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(t, FakeTensor) and t.fake_mode is not self for t in pytree.tree_leaves((args, kwargs))):
            raise _CrossedError
        return super().dispatch(func, types, args, kwargs)


class _Tracer(Interceptor):
    """Runs all stages on fake tensors, each in its own mode."""

    def __init__(self, stage_map: StageMap, device: torch.device):
        super().__init__(stage_map)
        self._device = device
        self._modes = [_StageMode() for _ in range(stage_map.number)]
        self.trace = Trace()
        self.unit = ""  # the one that is running

    def cross(self, boundary: int, given: list[Tensor]) -> None:
        positions, likes = [], []
        seen: set[int] = set()
        for position, t in enumerate(given):
            if isinstance(t, FakeTensor) and id(t) not in seen:
                seen.add(id(t))
                like = self.current(t)
                positions.append(position)
                likes.append(torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=like.requires_grad))
                with self._modes[boundary + 1]:
                    fresh = torch.empty(like.shape, dtype=like.dtype, device=like.device)
                self.replace(t, received(fresh.requires_grad_(like.requires_grad)))
        if not any(like.requires_grad for like in likes):
            raise StrategyError(
                f"pipeline: no argument of {self.stage_map.starts[boundary]!r} has a gradient, so the stages before it "
                "could not be trained: begin the stage with another module"
            )
        self.trace.boundaries.append(Boundary(positions, likes))

    def call(self, name: str, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        mode = self._modes[self.stage_map.stages[name]]
        given = {id(t): i for i, t in reversed([*enumerate(tensors_of((args, kwargs)))])}
        self.unit = name
        with without_data(module, mode, self._device, {}):
            out = inner(*args, **kwargs)
        self.unit = ""
        # A tensor that the unit made without reading a fake one is real here, but exists only in the unit's stage.
        out = map_tensors(lambda t: t if isinstance(t, FakeTensor) or id(t) in given else mode.from_tensor(t), out)
        shown = map_tensors(lambda t: t.detach() if isinstance(t, FakeTensor) else Argument(given[id(t)]), out)
        self.trace.outputs[name].append(shown)
        return out


def trace(stage_map: StageMap, device: torch.device, run: Callable[[Interceptor], Any]) -> Trace:
    """Trace a forward. `run` runs it with module calls going through the interceptor."""
    tracer = _Tracer(stage_map, device)
    try:
        with warnings.catch_warnings():
            # What code between modules computes from parameters is real and not a leaf, and torch reads its `.grad`.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            run(tracer)
    except _CrossedError as error:
        start = stage_map.starts[max(tracer.stage - 1, 0)]
        raise StrategyError(
            f"pipeline: after {start!r}, the first module of stage {tracer.stage}, the forward uses a tensor of an "
            "earlier stage that is not an argument of this module. Only arguments of the first module can enter a "
            "stage: begin the stage with another module, or pass that tensor along"
        ) from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = f"inside {tracer.unit!r}" if tracer.unit else "between two modules"
        raise StrategyError(
            f"pipeline: the forward depends {where} on the values of a tensor ({error.func}), which only the stage "
            "that computes it knows: begin the stage elsewhere, or turn pipeline off"
        ) from error
    return tracer.trace


def without_data(
    module: nn.Module, mode: FakeTensorMode, device: torch.device, fakes: dict[int, Tensor]
) -> AbstractContextManager[Any]:
    """The module with fake parameters and buffers. fakes: receives them, by the id of the tensor they replace."""

    def fake(t: Tensor) -> Tensor:
        if id(t) not in fakes:
            with mode:
                empty = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
            fakes[id(t)] = empty.requires_grad_(t.requires_grad)
        return fakes[id(t)]

    tensors = {n: fake(p) for n, p in module.named_parameters(remove_duplicate=False)}
    tensors |= {n: fake(b) for n, b in module.named_buffers(remove_duplicate=False)}
    return reparametrize_module(module, tensors)
