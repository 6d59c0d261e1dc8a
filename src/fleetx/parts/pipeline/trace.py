"""Which modules a forward calls in which stage, and what crosses the borders between stages.

Every rank runs the code of the whole forward, of any model, as the user wrote it. Modules of earlier stages are not
run: what they returned in the survey is put in their place, tensors without data. So what depends on such a tensor has
no data either, and whatever depends on the batch alone (masks, positions) is simply there. At the module with which its
stage begins, a rank replaces the tensors without data among its arguments by what it received; at the module with
which the next stage begins, it sends just these.
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
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from fleetx.base.module_names import has_forward, named_modules
from fleetx.base.trees import map_tensors, tensors_of, without_caches
from fleetx.base.wrapping import Layer, wrap
from fleetx.errors import StrategyError


@dataclass(frozen=True)
class Border:
    """What enters a stage: which tensors among the arguments of its first module, and what they are like."""

    positions: list[int]
    likes: list[Tensor]  # on the device "meta"


@dataclass(frozen=True)
class Units:
    """The largest modules that lie in one stage each. What is outside of them is code that runs between."""

    starts: list[str]  # the modules with which the stages after the first begin
    stages: dict[str, int]

    @property
    def number(self) -> int:
        return len(self.starts) + 1

    def of(self, name: str) -> int | None:
        """The stage of the module of this name; None: it is in several, or in none."""
        while name and name not in self.stages:
            name = name.rpartition(".")[0]
        return self.stages.get(name)


@dataclass
class Survey:
    """What a forward of this batch does."""

    outputs: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))  # of each call of a unit, no data
    borders: list[Border] = field(default_factory=list)  # borders[0]: what enters stage 1


@dataclass(frozen=True)
class Given:
    """In what a unit returned: a tensor that it was given, as it is."""

    position: int


Call = Callable[[], Any]  # runs a forward


# --- which modules are called in which stage ------------------------------------------------------
def units(model: nn.Module, starts: Sequence[str] | Callable[[str], int | None], call: Call) -> Units:
    """`starts`: names of modules, or what says on which stage a module was placed."""
    calls: dict[str, list[tuple[int, int]]] = defaultdict(list)
    found: list[str] = []

    def around(name: str, _: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        begins = starts(name) == len(found) + 1 if callable(starts) else name in starts and name not in found
        if begins:
            found.append(name)
        enter = len(found)
        args, kwargs = without_caches(args, kwargs)
        out = inner(*args, **kwargs)
        calls[name].append((enter, len(found)))
        return out

    undo = [wrap(m, Layer.STAGE, partial(around, name)) for name, m in named_modules(model) if has_forward(m)]
    try:
        call()
    finally:
        for remove in undo:
            remove()
    if not callable(starts) and (missed := sorted(set(starts) - set(found))):
        raise StrategyError(f"pipeline: {', '.join(missed)} takes no part in the forward, so no stage can begin there")
    stages: dict[str, int] = {}
    for name, _ in named_modules(model):  # outer ones first
        at = {stage for pair in calls.get(name, ()) for stage in pair}
        if len(at) == 1 and Units(found, stages).of(name) is None:
            stages[name] = at.pop()
    return Units(found, stages)


def check_placement(units_: Units, placed: dict[str, int], stages: int) -> None:
    """Were the layers called in the order of their stages?"""
    problems = []
    if units_.number < stages:
        problems.append(
            f"layers were placed on {stages} stages, and in the forward only {units_.number} of them begin one after "
            "the other"
        )
    for name, stage in placed.items():
        at = units_.of(name)
        if at is not None and at != stage and not problems:
            problems.append(f"{name!r} was placed on stage {stage}, and is called when stage {at} runs")
    if problems:
        raise StrategyError([f"pipeline: {p}: place layers in the order in which they are called" for p in problems])


# --- what crosses the borders ---------------------------------------------------------------------
class Visitor:
    """Is told of every call of a unit, and of a module with which a stage begins."""

    def __init__(self, units_: Units):
        self.units = units_
        self.stage = 0  # that the forward is in
        self._instead: dict[int, tuple[Tensor, Tensor]] = {}  # by id: what the code between modules still holds

    def enter(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if kwargs or not all(isinstance(a, Tensor) for a in args):
            args, kwargs = without_caches(args, kwargs)
        if self.stage < len(self.units.starts) and name == self.units.starts[self.stage]:
            self.cross(self.stage, tensors_of((args, kwargs)))
            self.stage += 1
        if not self._instead:
            return args, kwargs
        replaced: tuple[Any, Any] = map_tensors(self.now, (args, kwargs))
        return replaced

    def cross(self, border: int, given: list[Tensor]) -> None:
        raise NotImplementedError

    def call(self, name: str, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def now(self, t: Tensor) -> Tensor:
        return self._instead.get(id(t), (t, t))[1]

    def replace(self, old: Tensor, new: Tensor) -> None:
        self._instead[id(old)] = (old, new)  # the old one is held, so that no other gets its id


class _Crossed(Exception):  # noqa: N818
    """A tensor of an earlier stage was used past the border."""


class _Mode(FakeTensorMode):
    """Tensors without data of one stage, which do not mix with those of another."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(t, FakeTensor) and t.fake_mode is not self for t in pytree.tree_leaves((args, kwargs))):
            raise _Crossed
        return super().dispatch(func, types, args, kwargs)


def received(t: Tensor) -> Tensor:
    """As a module takes it: it may write to what another module returned, and not to a leaf."""
    return t.clone() if t.requires_grad else t


class Borders(Visitor):
    """Finds out what crosses. The tensors of each stage have a mode of their own."""

    def __init__(self, units_: Units, device: torch.device):
        super().__init__(units_)
        self._device = device
        self._modes = [_Mode() for _ in range(units_.number)]
        self.found = Survey()
        self.inside = ""  # the unit that is running

    def cross(self, border: int, given: list[Tensor]) -> None:
        positions, likes = [], []
        seen: set[int] = set()
        for position, t in enumerate(given):
            if isinstance(t, FakeTensor) and id(t) not in seen:
                seen.add(id(t))
                like = self.now(t)
                made = torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=like.requires_grad)
                positions.append(position)
                likes.append(made)
                with self._modes[border + 1]:
                    fresh = torch.empty(like.shape, dtype=like.dtype, device=like.device)
                self.replace(t, received(fresh.requires_grad_(like.requires_grad)))
        if not any(like.requires_grad for like in likes):
            raise StrategyError(
                f"pipeline: no tensor with a gradient goes into {self.units.starts[border]!r}, so the stages before it "
                "could not be trained: let the stage begin elsewhere"
            )
        self.found.borders.append(Border(positions, likes))

    def call(self, name: str, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        stage = self.units.stages[name]
        given = {id(t): i for i, t in reversed([*enumerate(tensors_of((args, kwargs)))])}
        self.inside = name
        with _without_data(module, self._modes[stage], self._device):
            out = inner(*args, **kwargs)
        self.inside = ""
        # What it made without reading anything of a stage is its own all the same, and not there in other stages.
        own = self._modes[stage].from_tensor
        out = map_tensors(lambda t: t if isinstance(t, FakeTensor) or id(t) in given else own(t), out)
        shown = map_tensors(lambda t: t.detach() if isinstance(t, FakeTensor) else Given(given[id(t)]), out)
        self.found.outputs[name].append(shown)
        return out


def borders(units_: Units, device: torch.device, run: Callable[[Visitor], Any]) -> Survey:
    """`run` makes a forward that tells the visitor."""
    visitor = Borders(units_, device)
    try:
        with warnings.catch_warnings():
            # What code between modules makes of parameters is real, no leaf, and torch asks for its gradient.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            run(visitor)
    except _Crossed as error:
        before = units_.starts[visitor.stage - 1] if visitor.stage else units_.starts[0]
        raise StrategyError(
            f"pipeline: behind {before!r}, with which stage {visitor.stage} begins, the forward uses a tensor of an "
            "earlier stage that is no argument of this module: only what is handed to the first module of a stage can "
            "cross into it. Let the stage begin elsewhere, or pass that tensor along"
        ) from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = f"inside of {visitor.inside!r}" if visitor.inside else "between two modules"
        raise StrategyError(
            f"pipeline: what the forward does {where} depends on the values of a tensor ({error.func}), which only the "
            "stage that computes it has. Such a model cannot be cut here"
        ) from error
    return visitor.found


def _without_data(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> AbstractContextManager[Any]:
    """The module with parameters and buffers that have no data."""
    made: dict[int, Tensor] = {}

    def fake(t: Tensor) -> Tensor:
        if id(t) not in made:
            with mode:
                empty = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
            made[id(t)] = empty.requires_grad_(t.requires_grad)
        return made[id(t)]

    tensors = {n: fake(p) for n, p in module.named_parameters(remove_duplicate=False)}
    tensors |= {n: fake(b) for n, b in module.named_buffers(remove_duplicate=False)}
    return _reparametrize_module(module, tensors)
