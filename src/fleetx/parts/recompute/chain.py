"""Runs the blocks of a model in segments that keep their inputs alone, and are run again when backward needs them.

    model(x)    calls block after block, and does what it likes between them:

                    a ──► b ──► c ──► d ──► e
                    └─ segment ─┘     └ one ┘       c is kept as a whole; of {a, b} only the input of a is kept

                each call is noted in the segments that are open: which module, and with what. What came out of an
                earlier call of the same segment is noted as that, and not held
    backward    asks for a tensor that was saved inside of a segment: its calls are made again, in order

A segment may lie inside of another: then it is run again when the outer one is. Between two calls, in the code of
whoever calls the blocks, nothing is in a segment: what is made there is kept as it would be, and held where a call
needs it. So any model will do; where all of the work is in the blocks, nothing else is held.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._mode_utils import no_dispatch
from torch.utils.checkpoint import _checkpoint_hook, _CheckpointFrame  # the seam: pyproject allows torch 2.13 only

from fleetx.base.trees import map_tensors, tensors_of, without_caches
from fleetx.base.wrapping import Layer, wrap
from fleetx.errors import UsageError
from fleetx.parts.recompute.buffers import Buffers
from fleetx.parts.recompute.offload import Host

Context = Callable[[], AbstractContextManager[Any]]
Inner = Callable[..., Any]


class Guide(Protocol):
    """Says where segments begin and end. It is asked once for each call of a block, in the order of the calls."""

    def begin(self) -> None:
        """A forward begins."""

    def step(self, name: str) -> tuple[int, int]:
        """How many segments begin before this call, the outer ones first, and how many end after it."""
        ...

    def end(self) -> None:
        """A forward has ended."""


class Chain:
    """The blocks of one model."""

    def __init__(
        self,
        blocks: dict[str, nn.Module],
        guide: Guide,
        context: Context,
        host: Host | None = None,
        writes: Collection[str] | None = None,
    ):
        """writes: the blocks that change their inputs in place, if that is known."""
        self.guide, self._context, self._host = guide, context, host
        self._open: list[_Segment] = []
        self._running = 0  # forwards of the model: blocks that are called outside of one are left alone
        # Where it is not known, the first call of a block copies what it is given, and tells.
        self._writes = {} if writes is None else {name: name in writes for name in blocks}
        for name, module in blocks.items():
            wrap(module, Layer.REPLAY, partial(self._call, name, Buffers(module)))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward of the model."""
        if not self._running and torch.is_grad_enabled():
            self._open = []
            self.guide.begin()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._open = []
        if not self._running and torch.is_grad_enabled():
            self.guide.end()

    def _call(self, name: str, buffers: Buffers, module: nn.Module, inner: Inner, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self._running:
            return inner(*args, **kwargs)
        begin, end = self.guide.step(name)
        args, kwargs = without_caches(args, kwargs)  # also of a block that is kept: another would find it filled
        if not begin and not self._open:
            return inner(*args, **kwargs)
        conditions = Conditions(buffers, self._context, (args, kwargs), writes=self._writes.get(name, True))
        given = [(t, t._version) for t in tensors_of((args, kwargs))]
        if hasattr(module, "unshard"):
            inner = partial(_gathered, module, inner)
        with conditions.first():
            out = _run(self._open, inner, args, kwargs, conditions, begin, end, self._host)
        if written := [t for t, version in given if t._version != version]:
            self._check_alone(name, written, [t for t, _ in given])
        self._writes[name] = self._writes.get(name, False) or bool(written)
        return out

    def _check_alone(self, name: str, written: list[Tensor], given: list[Tensor]) -> None:
        storages = [t.untyped_storage()._cdata for t in {id(t): t for t in given}.values()]
        if any(storages.count(t.untyped_storage()._cdata) > 1 for t in written):
            raise UsageError(
                f"recompute: {name!r} writes in place to one of several arguments that share memory, which a second "
                "pass would be given apart: pass copies, or keep it out of the segments"
            )


def _gathered(module: Any, inner: Inner, *args: Any, **kwargs: Any) -> Any:
    """FSDP gathers the parameters of a module in a hook around its call, which a second pass does not come through."""
    module.unshard()
    return inner(*args, **kwargs)


class Conditions:
    """Under which a block was called: a second pass must find the same."""

    def __init__(self, buffers: Buffers, context: Context, inputs: Any, *, writes: bool):
        self._buffers, self._context = buffers, context
        self.writes = writes  # may it change its inputs in place?
        self._versions = buffers.versions()
        tensors = tensors_of(inputs)
        self._device = torch_checkpoint._infer_device_type(*tensors)
        self._autocasts = torch_checkpoint._get_autocast_kwargs(self._device)
        self._random = _random_state()
        module = torch_checkpoint._get_device_module(self._device)
        used = getattr(module, "_initialized", False)
        self._devices, self._states = torch_checkpoint.get_device_states(*tensors) if used else ([], [])
        self._found: dict[str, Tensor] = {}

    def first(self) -> AbstractContextManager[None]:
        return self._buffers.watch(self._found)

    def unwritten(self, tensor: Tensor) -> Tensor:
        """To be there for the second pass as it is before the first. To a leaf with a gradient nobody may write."""
        return tensor.clone() if self.writes and not (tensor.is_leaf and tensor.requires_grad) else tensor

    @contextmanager
    def again(self) -> Iterator[None]:
        if self._buffers.versions() != self._versions:
            raise UsageError(
                "recompute: parameters were changed in place between forward and backward, so the second pass would "
                "compute something else: call backward() before optimizer.step()"
            )
        here, cpu = self._autocasts
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self._devices, device_type=self._device))
            torch.set_rng_state(self._random)
            if self._devices:
                torch_checkpoint.set_device_states(self._devices, self._states, device_type=self._device)
            if here is not None:
                stack.enter_context(torch.amp.autocast(self._device, **here))
            stack.enter_context(torch.amp.autocast("cpu", **cpu))
            stack.enter_context(self._context())
            stack.enter_context(self._buffers.shielded(self._found))
            yield


_last_state = torch.empty(0, dtype=torch.uint8)


def _random_state() -> Tensor:
    """The same tensor as last time, where nothing was drawn since: it has five thousand bytes."""
    global _last_state
    state = torch.get_rng_state()
    with no_dispatch():  # it is a real tensor, also where a step is predicted on fake ones
        if not torch.equal(state, _last_state):
            _last_state = state
    return _last_state


@dataclass(frozen=True)
class _Kept:
    """Stands for a tensor that the segment holds."""

    index: int


@dataclass(frozen=True)
class _Made:
    """Stands for a tensor that an earlier call of the segment returned."""

    call: int
    index: int


@dataclass(frozen=True)
class _Call:
    inner: Inner
    arguments: Any  # (args, kwargs) with marks in the place of tensors
    conditions: Conditions
    begin: int  # segments inside of this one that begin before the call
    end: int  # and that end after it


@dataclass
class _Segment:
    """One that is open. What outlives it is torch's frame, which the graph holds, and its calls."""

    frame: _Frame
    calls: list[_Call] = field(default_factory=list)
    made: list[list[tuple[weakref.ref[Tensor], int]]] = field(default_factory=list)  # what calls returned; versions

    def note(self, inner: Inner, args: Any, kwargs: Any, conditions: Conditions, begin: int, end: int) -> None:
        marks: dict[int, Any] = {}  # what is given twice is held once, and given twice again
        arguments = map_tensors(partial(self._mark, conditions, marks), (args, kwargs))
        self.calls.append(_Call(inner, arguments, conditions, begin, end))

    def _mark(self, conditions: Conditions, marks: dict[int, Any], tensor: Tensor) -> Any:
        if id(tensor) not in marks:
            marks[id(tensor)] = self._made_here(tensor) or _Kept(self.frame.keep(conditions.unwritten(tensor)))
        return marks[id(tensor)]

    def _made_here(self, tensor: Tensor) -> _Made | None:
        for call in reversed(range(len(self.made))):
            for index, (made, version) in enumerate(self.made[call]):
                if made() is tensor and tensor._version == version:  # else it was changed in place since
                    return _Made(call, index)
        return None

    def returned(self, out: Any) -> None:
        self.made.append([(weakref.ref(t), t._version) for t in tensors_of(out)])


class _Frame(_CheckpointFrame):
    """torch's own, which counts what is saved and hands it out again. It may keep its inputs on the host."""

    def __init__(self, calls: list[_Call], host: Host | None):
        super().__init__(partial(_again, calls), True, None, torch_checkpoint._default_meta_extractor)
        self._host = host.line() if host is not None else None

    def keep(self, tensor: Tensor) -> int:
        kept = self._host.put(tensor) if self._host else torch_checkpoint._make_saved_tensor(tensor, is_output=False)
        self.saved_args.append(kept)
        return len(self.saved_args) - 1

    def get_inputs(self) -> list[Any]:
        if self._host:
            return self._host.take(self.saved_args)
        return super().get_inputs()


def _run(
    opened: list[_Segment], inner: Inner, args: Any, kwargs: Any, conditions: Conditions, begin: int, end: int,
    host: Host | None = None,
) -> Any:  # fmt: skip
    """Call a block inside of the segments that are open and of those that begin."""
    for _ in range(begin):
        calls: list[_Call] = []
        opened.append(_Segment(_Frame(calls, host if not opened else None), calls))
    with ExitStack() as stack:
        for depth, segment in enumerate(opened):
            inside = len(opened) - depth - 1
            # Noted under the hooks of those around it: what an inner segment holds, the outer one makes again.
            segment.note(inner, args, kwargs, conditions, min(begin, inside), min(end, inside))
            stack.enter_context(_checkpoint_hook(segment.frame))
        out = inner(*args, **kwargs)
    for segment in opened:
        segment.returned(out)
    for segment in opened[len(opened) - end :]:
        segment.frame.forward_completed = True
    del opened[len(opened) - end :]
    return out


def _again(calls: Sequence[_Call], *kept: Any) -> None:
    """Make the calls of a segment again. torch stops it as soon as it has what backward needs."""
    opened: list[_Segment] = []
    needed = _last_uses(calls)
    made: dict[tuple[int, int], Tensor] = {}
    for number, call in enumerate(calls):
        # What a block writes to is copied: there may be a third pass.
        here = [t.clone() if isinstance(t, Tensor) else t for t in kept] if call.conditions.writes else kept
        args, kwargs = map_tensors(partial(_value, here, made), call.arguments, kind=(_Kept, _Made))
        with call.conditions.again():
            out = _run(opened, call.inner, args, kwargs, call.conditions, call.begin, call.end)
        made |= {(number, i): t for i, t in enumerate(tensors_of(out)) if needed.get((number, i), -1) > number}
        made = {place: t for place, t in made.items() if needed[place] > number}
        del args, kwargs, out, here


def _value(kept: Sequence[Any], made: dict[tuple[int, int], Tensor], mark: Any) -> Any:
    return kept[mark.index] if isinstance(mark, _Kept) else made[mark.call, mark.index]


def _last_uses(calls: Sequence[_Call]) -> dict[tuple[int, int], int]:
    """By which call each of the tensors that calls hand on is read last."""
    found: dict[tuple[int, int], int] = {}

    def see(number: int, mark: _Made) -> _Made:
        found[mark.call, mark.index] = number
        return mark

    for number, call in enumerate(calls):
        map_tensors(partial(see, number), call.arguments, kind=_Made)
    return found
