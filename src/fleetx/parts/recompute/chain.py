"""Runs the blocks of a model in segments that keep only their inputs, and runs them again when backward needs them.

    model(x)    calls block after block, with any code in between:

                    a ──► b ──► c ──► d ──► e
                    └─ segment ─┘     └ one ┘       c is kept in full; of {a, b} only the input of a is kept

                Each open segment records its calls: the module and the arguments. An argument that an earlier call of
                the same segment returned is recorded as a reference and not held.
    backward    asks for a tensor that was saved inside a segment: the calls are repeated, in order

Segments may be nested: an inner one is recomputed when the outer one is. Code between two calls belongs to no segment:
what it saves is kept as usual, and its results are held if a call needs them. So this works for any model, and holds
nothing extra if all the work is in the blocks.
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

from fleetx.base import seams
from fleetx.base.seams import CheckpointFrame, checkpoint_hook, no_dispatch
from fleetx.base.trees import map_tensors, tensors_of, without_caches
from fleetx.base.wrapping import Layer, wrap
from fleetx.errors import UsageError
from fleetx.measure.fake_step import AroundForward
from fleetx.parts.recompute.buffers import Buffers
from fleetx.parts.recompute.offload import Offload

Inner = Callable[..., Any]


class Segmenter(Protocol):
    """Decides where segments begin and end. It is asked once per call of a block, in order."""

    def begin(self) -> None:
        """A forward begins."""

    def step(self, name: str) -> tuple[int, int]:
        """How many segments begin before this call, outer ones first, and how many end after it."""
        ...

    def end(self) -> None:
        """A forward has ended."""


class Chain:
    """The blocks of one model."""

    def __init__(
        self,
        blocks: dict[str, nn.Module],
        segmenter: Segmenter,
        context: AroundForward,
        offload: Offload | None = None,
        in_place: Collection[str] | None = None,
    ):
        """in_place: the blocks that modify their inputs, if known."""
        self._segmenter, self._context, self._offload = segmenter, context, offload
        self._open: list[_Segment] = []
        self._running = 0  # forwards of the model: blocks called outside one are left alone
        # If unknown, the first call of a block copies its inputs and finds out.
        self._in_place = {} if in_place is None else {name: name in in_place for name in blocks}
        for name, module in blocks.items():
            wrap(module, Layer.REPLAY, partial(self._call, name, Buffers(module)))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward of the model."""
        if not self._running and torch.is_grad_enabled():
            self._open = []
            self._segmenter.begin()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._open = []
        if not self._running and torch.is_grad_enabled():
            self._segmenter.end()

    def _call(self, name: str, buffers: Buffers, module: nn.Module, inner: Inner, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self._running:
            return inner(*args, **kwargs)
        begin, end = self._segmenter.step(name)
        args, kwargs = without_caches(args, kwargs)  # kept blocks too, or they would fill them for the others
        if not begin and not self._open:
            return inner(*args, **kwargs)
        state = ReplayState(buffers, self._context, (args, kwargs), in_place=self._in_place.get(name, True))
        given = [(t, seams.version(t)) for t in tensors_of((args, kwargs))]
        if hasattr(module, "unshard"):
            inner = partial(_gathered, module, inner)
        with state.first():
            out = _run(self._open, inner, args, kwargs, state, begin, end, self._offload)
        if written := [t for t, version in given if seams.version(t) != version]:
            _check_memory_not_shared(name, written, [t for t, _ in given])
        self._in_place[name] = self._in_place.get(name, False) or bool(written)
        return out


def _check_memory_not_shared(name: str, written: list[Tensor], given: list[Tensor]) -> None:
    storages = [seams.storage_id(t.untyped_storage()) for t in {id(t): t for t in given}.values()]
    if any(storages.count(seams.storage_id(t.untyped_storage())) > 1 for t in written):
        raise UsageError(
            f"recompute: {name!r} modifies an argument in place that shares memory with another argument, but a second "
            "pass would get them as separate tensors: pass copies, or keep this module out of the segments"
        )


def _gathered(module: Any, inner: Inner, *args: Any, **kwargs: Any) -> Any:
    """FSDP gathers the parameters of a module in a hook around its call, which a second pass does not run."""
    module.unshard()
    return inner(*args, **kwargs)


class ReplayState:
    """The state in which a block was called, restored for its second pass."""

    def __init__(self, buffers: Buffers, context: AroundForward, inputs: Any, *, in_place: bool):
        self._buffers, self._context = buffers, context
        self.in_place = in_place  # the block may modify its inputs
        self._versions = buffers.versions()
        tensors = tensors_of(inputs)
        self._device = seams.infer_device_type(*tensors)
        self._autocasts = seams.autocast_kwargs(self._device)
        self._rng = _rng_state()
        module = seams.device_module(self._device)
        used = getattr(module, seams.INITIALIZED, False)
        self._devices, self._device_rng = torch_checkpoint.get_device_states(*tensors) if used else ([], [])
        self._original: dict[str, Tensor] = {}

    def first(self) -> AbstractContextManager[None]:
        return self._buffers.watch(self._original)

    def unmodified(self, tensor: Tensor) -> Tensor:
        """The tensor in its current state, for the second pass. A leaf that requires a gradient cannot be modified."""
        return tensor.clone() if self.in_place and not (tensor.is_leaf and tensor.requires_grad) else tensor

    @contextmanager
    def again(self) -> Iterator[None]:
        if self._buffers.versions() != self._versions:
            raise UsageError(
                "recompute: parameters were modified in place between forward and backward, so recomputing would give "
                "a different result: call backward() before optimizer.step()"
            )
        here, cpu = self._autocasts
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self._devices, device_type=self._device))
            torch.set_rng_state(self._rng)
            if self._devices:
                torch_checkpoint.set_device_states(self._devices, self._device_rng, device_type=self._device)
            if here is not None:
                stack.enter_context(torch.amp.autocast(self._device, **here))
            stack.enter_context(torch.amp.autocast("cpu", **cpu))
            stack.enter_context(self._context())
            stack.enter_context(self._buffers.shielded(self._original))
            yield


_last_state = torch.empty(0, dtype=torch.uint8)


def _rng_state() -> Tensor:
    """The random state: the same tensor as last time if nothing was drawn since, because it takes 5 kB."""
    global _last_state
    state = torch.get_rng_state()
    with no_dispatch():  # it is a real tensor even if the step runs on fake ones
        if not torch.equal(state, _last_state):
            _last_state = state
    return _last_state


@dataclass(frozen=True)
class _Kept:
    """Stands for a tensor that the segment holds."""

    index: int


@dataclass(frozen=True)
class _Returned:
    """Stands for a tensor that an earlier call of the segment returned."""

    call: int
    index: int


@dataclass(frozen=True)
class _SegmentCall:
    inner: Inner
    arguments: Any  # (args, kwargs) with _Kept and _Returned in place of tensors
    state: ReplayState
    begin: int  # inner segments that begin before the call
    end: int  # inner segments that end after it


@dataclass
class _Segment:
    """A segment while it is open. Afterwards only its frame, which the graph holds, and its calls remain."""

    frame: _Frame
    calls: list[_SegmentCall] = field(default_factory=list)
    returned: list[list[tuple[weakref.ref[Tensor], int]]] = field(default_factory=list)  # per call, with versions

    def record(self, inner: Inner, args: Any, kwargs: Any, state: ReplayState, begin: int, end: int) -> None:
        marks: dict[int, Any] = {}  # a tensor that is passed twice is held once and passed twice again
        arguments = map_tensors(partial(self._mark, state, marks), (args, kwargs))
        self.calls.append(_SegmentCall(inner, arguments, state, begin, end))

    def _mark(self, state: ReplayState, marks: dict[int, Any], tensor: Tensor) -> Any:
        if id(tensor) not in marks:
            marks[id(tensor)] = self._find(tensor) or _Kept(self.frame.keep(state.unmodified(tensor)))
        return marks[id(tensor)]

    def _find(self, tensor: Tensor) -> _Returned | None:
        for call in reversed(range(len(self.returned))):
            for index, (ref, version) in enumerate(self.returned[call]):
                if ref() is tensor and seams.version(tensor) == version:  # otherwise it was modified in place since
                    return _Returned(call, index)
        return None


class _Frame(CheckpointFrame):
    """torch's checkpoint frame, which counts the saved tensors and restores them. May keep its inputs on the host."""

    def __init__(self, calls: list[_SegmentCall], offload: Offload | None):
        super().__init__(partial(_run_again, calls), True, None, seams.default_meta_extractor)
        self._offloaded = offload.next_segment() if offload is not None else None

    def keep(self, tensor: Tensor) -> int:
        if self._offloaded:
            self.saved_args.append(self._offloaded.put(tensor))
        else:
            self.saved_args.append(seams.make_saved_tensor(tensor, is_output=False))
        return len(self.saved_args) - 1

    def get_inputs(self) -> list[Any]:
        return self._offloaded.take(self.saved_args) if self._offloaded else super().get_inputs()


def _run(
    opened: list[_Segment], inner: Inner, args: Any, kwargs: Any, state: ReplayState, begin: int, end: int,
    offload: Offload | None = None,
) -> Any:  # fmt: skip
    """Call a block inside the open segments and those that begin with it."""
    for _ in range(begin):
        calls: list[_SegmentCall] = []
        opened.append(_Segment(_Frame(calls, offload if not opened else None), calls))
    with ExitStack() as stack:
        for depth, segment in enumerate(opened):
            inside = len(opened) - depth - 1
            # Recorded under the hooks of the outer segments: they recompute what an inner segment holds.
            segment.record(inner, args, kwargs, state, min(begin, inside), min(end, inside))
            stack.enter_context(checkpoint_hook(segment.frame))
        out = inner(*args, **kwargs)
    for segment in opened:
        segment.returned.append([(weakref.ref(t), seams.version(t)) for t in tensors_of(out)])
    for segment in opened[len(opened) - end :]:
        segment.frame.forward_completed = True
    del opened[len(opened) - end :]
    return out


def _run_again(calls: Sequence[_SegmentCall], *kept: Any) -> None:
    """Repeat the calls of a segment. torch stops it as soon as backward has what it needs."""
    opened: list[_Segment] = []
    needed = _last_uses(calls)
    returned: dict[tuple[int, int], Tensor] = {}
    for number, call in enumerate(calls):
        # Copies for a block that modifies its inputs: there may be a third pass.
        here = [t.clone() if isinstance(t, Tensor) else t for t in kept] if call.state.in_place else kept
        args, kwargs = map_tensors(partial(_value, here, returned), call.arguments, kind=(_Kept, _Returned))
        with call.state.again():
            out = _run(opened, call.inner, args, kwargs, call.state, call.begin, call.end)
        returned |= {(number, i): t for i, t in enumerate(tensors_of(out)) if needed.get((number, i), -1) > number}
        returned = {key: t for key, t in returned.items() if needed[key] > number}
        del args, kwargs, out, here


def _value(kept: Sequence[Any], returned: dict[tuple[int, int], Tensor], mark: Any) -> Any:
    return kept[mark.index] if isinstance(mark, _Kept) else returned[mark.call, mark.index]


def _last_uses(calls: Sequence[_SegmentCall]) -> dict[tuple[int, int], int]:
    """For each tensor that one call passes to another: the last call that reads it."""
    uses: dict[tuple[int, int], int] = {}

    def see(number: int, mark: _Returned) -> _Returned:
        uses[mark.call, mark.index] = number
        return mark

    for number, call in enumerate(calls):
        map_tensors(partial(see, number), call.arguments, kind=_Returned)
    return uses
