"""Splits a model into blocks and finds the cost of each: bytes on fake tensors, seconds on real ones.

Only one block at a time runs for real, and of several identical blocks only one. So even a model that does not fit into
memory can be profiled.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from fleetx.base import seams
from fleetx.base.module_names import named_modules
from fleetx.base.trees import map_tensors, tensors_of, without_caches
from fleetx.base.wrapping import Layer, unwrap, wrap
from fleetx.measure.fake_step import FakeStep, TrainingStep, preserve_rng, shapes_of, without_hooks
from fleetx.measure.op_scratch import OpScratch, random_tensor, with_scratch
from fleetx.measure.tracker import Tracker, bytes_of

MAX_BLOCKS = 240  # the solver takes a second for this many
NEGLIGIBLE = 0.01  # of all saved bytes: a module is only split if the code between its children saves less
REPEATS, ENOUGH = 4, 0.3  # runs of a block; after this many seconds, two runs are enough


@dataclass(frozen=True)
class BlockCost:
    """The cost of one call of a block, in seconds and bytes."""

    name: str
    forward: float  # seconds
    backward: float
    input: int  # bytes that a segment starting here holds
    input_saved: int  # of the input, what its backward needs and no earlier block saved
    saved: int  # what its backward needs apart from its input
    forward_peak: int  # peak of a forward that saves nothing, output included
    saving_peak: int  # peak of a forward that saves what backward needs
    backward_peak: int  # on top of what was saved
    gradients: int = 0  # of its parameters; they exist from its backward on
    loose: int = 0  # inputs made by code between the blocks: any segment that contains the block must hold them
    ready: bool = False  # its input is saved anyway if the block before it is kept
    reads: tuple[tuple[int, int, int], ...] = ()  # for each input: the block that made it, the tensor's id, its bytes


@dataclass(frozen=True)
class BlockProfile:
    """The blocks of a model in the order of their calls."""

    blocks: list[BlockCost]
    in_place: list[str]  # names of the blocks that modify their input

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.blocks]


Edge = tuple[Node, int]  # an operation, and which of its outputs


@dataclass
class ModuleCall:
    """One call of a module in a forward, and the calls inside it."""

    name: str
    module: nn.Module
    args: Any = ()
    kwargs: Any = None
    outputs: list[Tensor] = field(default_factory=list)
    inside: list[ModuleCall] = field(default_factory=list)
    no_grad: list[ModuleCall] = field(default_factory=list)  # of the root: calls made without gradients
    own_saved: int = 0  # bytes saved by its own code, not by the modules that it calls
    saved: int = 0  # including theirs
    storages: dict[int, int] = field(default_factory=dict)  # which its own code was the first to save, and their bytes
    loose: int = 0  # bytes of its inputs that are not the unchanged output of another module
    in_place: bool = False  # it modifies an input
    sources: set[Edge] = field(default_factory=set)  # where its inputs come from in the autograd graph
    ops: tuple[int, int] = (0, 0)  # autograd's sequence numbers at its start and end
    order: tuple[int, int] = (0, 0)  # of its start and end among those of all calls


Split = Callable[[ModuleCall, Callable[[], ModuleCall]], list[list[ModuleCall]]]


def profile_blocks(step: TrainingStep, *, timed: bool = True) -> list[BlockProfile]:
    """A coarse profile, whose segments hold only what crosses their ends, and a fine one if that differs.

    timed: if False, nothing runs for real and every block counts as one second.
    """

    def coarse_and_fine(root: ModuleCall, _: Any) -> list[list[ModuleCall]]:
        coarse, fine = split(root, _is_chain), split(root, lambda _: True)
        return [coarse] if [c.name for c in coarse] == [c.name for c in fine] else [coarse, fine]

    return profile(step, coarse_and_fine, timed=timed)


def profile(step: TrainingStep, divide: Split, *, timed: bool) -> list[BlockProfile]:
    """divide: turns a forward (and a function that repeats it with nothing frozen) into one or more lists of calls."""
    fake = FakeStep(step)
    with preserve_rng(), torch.enable_grad():
        known: dict[Any, BlockCost] = {}
        return [_profile(calls, fake, known, timed) for calls in divide(_record(fake), partial(_record_unfrozen, fake))]


# --- recording and splitting a forward ------------------------------------------------------------
def _record(fake: FakeStep) -> ModuleCall:
    """Run a forward on fake tensors, and record which modules are called and what they save."""
    root = ModuleCall("", fake.model)
    stack = [root]
    held = itertools.chain(fake.model.parameters(), fake.model.buffers())
    seen = {seams.storage_id(t.untyped_storage()) for t in held}
    outputs: dict[int, tuple[Tensor, int]] = {}  # by id, of all calls so far, with their versions
    order = itertools.count()

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if seams.storage_id(storage) not in seen:
            seen.add(seams.storage_id(storage))
            stack[-1].own_saved += storage.nbytes()
            stack[-1].storages[seams.storage_id(storage)] = storage.nbytes()
        return t

    def around(name: str, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # calls without gradients do not belong to a segment
            out = inner(*args, **kwargs)
            root.no_grad.append(ModuleCall(name, module, outputs=tensors_of(out), order=(next(order), next(order))))
            return out
        args, kwargs = without_caches(args, kwargs)
        given = tensors_of((args, kwargs))
        versions = [seams.version(t) for t in given]
        call = ModuleCall(name, module, args=args, kwargs=kwargs)
        computed = [t for t in given if t.grad_fn is not None]
        call.sources = {(t.grad_fn, t.output_nr) for t in computed if t.grad_fn is not None}
        call.loose = bytes_of(t for t in computed if outputs.get(id(t), (t, -1))[1] != seams.version(t))
        stack[-1].inside.append(call)
        stack.append(call)
        op, position = seams.sequence_number(), next(order)
        out = inner(*args, **kwargs)
        call.ops, call.order = (op, seams.sequence_number()), (position, next(order))
        stack.pop()
        call.outputs = tensors_of(out)
        call.in_place = versions != [seams.version(t) for t in given]
        outputs.update({id(t): (t, seams.version(t)) for t in call.outputs})
        return out

    for name, module in named_modules(fake.model):
        wrap(module, Layer.REPLAY, partial(around, name))
    assert fake.engine  # creating it installs its hooks
    with fake.mode, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        root.outputs = tensors_of(fake.model(*fake.args, **fake.kwargs))
    unwrap(fake.model.modules())
    _add_up(root)
    return root


def _record_unfrozen(fake: FakeStep) -> ModuleCall:
    frozen = [p for p in fake.model.parameters() if p.is_floating_point() and not p.requires_grad]
    for p in frozen:
        p.requires_grad_()
    try:
        return _record(fake)
    finally:
        for p in frozen:
            p.requires_grad_(False)


def _add_up(call: ModuleCall) -> int:
    call.saved = call.own_saved + sum(map(_add_up, call.inside))
    return call.saved


def split(root: ModuleCall, allowed: Callable[[ModuleCall], bool]) -> list[ModuleCall]:
    """Split the call that saves most, then the next, as long as little is saved between the pieces."""
    position = {id(call): i for i, call in enumerate(walk(root))}
    done: list[ModuleCall] = []
    waiting = [(-root.saved, 0, root)]
    while waiting:
        _, _, call = heapq.heappop(waiting)
        few = len(done) + len(waiting) + len(call.inside) < MAX_BLOCKS
        if call is root or (call.inside and few and call.own_saved <= NEGLIGIBLE * root.saved and allowed(call)):
            for c in call.inside:
                heapq.heappush(waiting, (-c.saved, position[id(c)], c))
        else:
            done.append(call)
    return sorted(done, key=lambda c: position[id(c)])


def _is_chain(call: ModuleCall) -> bool:
    """Does each call inside pass its outputs, unchanged, to the next one only?"""
    for before, after in itertools.pairwise(call.inside):
        given = {id(t) for t in tensors_of((after.args, after.kwargs)) if t.grad_fn is not None}
        if after.loose or not given <= {id(t) for t in before.outputs}:
            return False
    return True


def walk(call: ModuleCall) -> Iterator[ModuleCall]:
    yield call
    for inner in call.inside:
        yield from walk(inner)


# --- what each block costs ------------------------------------------------------------------------
def _profile(calls: list[ModuleCall], fake: FakeStep, known: dict[Any, BlockCost], timed: bool) -> BlockProfile:
    makers: dict[int, int] = {}  # by the id of a tensor: the call that returned it
    already: set[int] = set()  # storages that earlier calls saved
    blocks = []
    for number, call in enumerate(calls):
        given = tensors_of((call.args, call.kwargs))
        reads = {id(t): (makers[id(t)], id(t), t.untyped_storage().nbytes()) for t in given if id(t) in makers}
        inputs = {seams.storage_id(t.untyped_storage()) for t in given}
        saved = {storage: size for inner in walk(call) for storage, size in inner.storages.items()}
        if (key := _signature(call)) not in known:
            known[key] = _cost(call, fake, timed)
        blocks.append(
            replace(
                known[key],
                name=call.name,
                input=sum(size for _, _, size in reads.values()) + call.loose,
                input_saved=sum(size for storage, size in saved.items() if storage in inputs),
                saved=sum(size for storage, size in saved.items() if storage not in inputs),
                loose=call.loose,
                ready=bool(inputs) and inputs <= already,
                reads=tuple(reads.values()),
            )
        )
        already |= saved.keys()
        makers |= {id(t): number for t in call.outputs}
    return BlockProfile(blocks, sorted({call.name for call in calls if call.in_place}))


def _signature(call: ModuleCall) -> Any:
    """Equal for blocks that cost the same."""
    inside = tuple((n, type(m), m.extra_repr()) for n, m in call.module.named_modules())
    weights = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in call.module.named_parameters())
    others = repr([a for a in (*call.args, *(call.kwargs or {}).items()) if not isinstance(a, Tensor)])[:200]
    return inside, weights, tuple(shapes_of((call.args, call.kwargs))), others


def _cost(call: ModuleCall, fake: FakeStep, timed: bool) -> BlockCost:
    forward_peak, saving_peak, backward_peak = with_scratch(fake.step.device, partial(_bytes, call, fake))
    forward, backward = _seconds(call, fake) if timed else (1.0, 1.0)
    gradients = 0 if fake.step.kept_gradients else sum(p.nbytes for p in call.module.parameters() if p.requires_grad)
    return BlockCost("", forward, backward, 0, 0, 0, forward_peak, saving_peak, backward_peak, gradients)


def _bytes(call: ModuleCall, fake: FakeStep, scratch: OpScratch) -> tuple[int, int, int]:
    """forward_peak, saving_peak and backward_peak, on fake tensors."""
    with fake.mode, Tracker(scratch) as tracker:
        args, kwargs = map_tensors(_empty_like, (call.args, call.kwargs))
        for t in (*call.module.parameters(), *call.module.buffers(), *tensors_of((args, kwargs))):
            tracker.see(t)
        start = tracker.live
        tracker.reset()
        with torch.no_grad(), fake.contexts():
            call.module(*args, **kwargs)
        forward_peak = tracker.peak - start
        tracker.reset()
        with fake.contexts():
            roots = [t for t in tensors_of(call.module(*args, **kwargs)) if t.requires_grad]
        saving_peak = tracker.peak - start
        before = tracker.live
        tracker.reset()
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        grown = tracker.peak - before - sum(p.nbytes for p in call.module.parameters() if p.grad is not None)
        for p in call.module.parameters():
            p.grad = None
    return forward_peak, saving_peak, max(grown, 0)


def _seconds(call: ModuleCall, fake: FakeStep) -> tuple[float, float]:
    """The time of a real forward and backward of a copy."""
    device = fake.step.device
    module = _real_copy(call.module, fake)
    times: list[tuple[float, float]] = []
    while len(times) < 2 or (len(times) < REPEATS and sum(map(sum, times)) < ENOUGH):
        args, kwargs = map_tensors(_random_like, (call.args, call.kwargs))
        start = now(device)
        with fake.contexts():
            out = module(*args, **kwargs)
        forward = now(device) - start
        roots = [t for t in tensors_of(out) if t.requires_grad]
        grads = [torch.ones_like(t) for t in roots]
        start = now(device)
        if roots:
            torch.autograd.backward(roots, grads)
        times.append((forward, now(device) - start))
        del out, roots, grads, args, kwargs
    forwards, backwards = zip(*times, strict=True)
    return min(forwards), min(backwards)


def _real_copy(block: nn.Module, fake: FakeStep) -> nn.Module:
    """A copy of the block in the user's model, whose gradients and statistics must not change."""
    real = dict(zip(map(id, fake.model.modules()), fake.step.model.modules(), strict=True))[id(block)]
    left = (v for m in real.modules() for v in vars(m).values() if isinstance(v, Tensor))
    memo = {id(value): value.detach().clone() for value in left}  # deepcopy cannot copy a tensor that has a grad_fn
    return without_hooks(copy.deepcopy(real, memo))


def _empty_like(t: Tensor) -> Tensor:
    return _not_a_leaf(torch.empty_like(t.detach()), t.requires_grad)


def _random_like(t: Tensor) -> Tensor:
    return _not_a_leaf(random_tensor(t.shape, t.stride(), t.dtype, t.device), t.requires_grad)


def _not_a_leaf(t: Tensor, requires_grad: bool) -> Tensor:
    """Make it a non-leaf: a module may modify its input in place, which autograd forbids for leaves."""
    return t.requires_grad_().clone() if requires_grad else t


def now(device: torch.device) -> float:
    """The time in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
