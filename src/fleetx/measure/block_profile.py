"""Takes a model apart into blocks, and finds out what each costs: bytes on tensors without data, seconds on real ones.

Only one block at a time is run for real, and of blocks that are alike only one: a model that would not fit into memory
can be probed.
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
from torch.autograd import _get_sequence_nr
from torch.autograd.graph import Node

from fleetx.base.module_names import named_modules
from fleetx.base.trees import map_tensors, tensors_of, without_caches
from fleetx.base.wrapping import Layer, unwrap, wrap
from fleetx.measure.fake_step import Fakes, Step, random_kept, without_hooks
from fleetx.measure.op_scratch import Insides, made_up
from fleetx.measure.tracker import Tracker, bytes_of


@dataclass(frozen=True)
class Block:
    """What a probe found of one call. Times in seconds, the rest in bytes."""

    name: str
    forward: float
    backward: float
    input: int  # what a segment that begins here holds
    takes: int  # of its input, what is kept for its backward and was not kept before
    saved: int  # what is kept for its backward besides its input
    passing: int  # the most that is there at once while it runs and keeps nothing, with the output
    keeping: int  # and while it runs and keeps what backward needs
    undoing: int  # the most that its backward adds to what it has kept
    gradients: int = 0  # of its parameters, which are there from its backward on
    loose: int = 0  # what code between the blocks made for it: a segment that it is in must hold that too
    ready: bool = False  # is its input kept already, if the block before it is?
    reads: tuple[tuple[int, int, int], ...] = ()  # what it is given: the block that made it, its number, its bytes


MOST = 240  # blocks: the solver takes a second for so many
LITTLE = 0.01  # of what a model saves: what may be saved between the blocks of a module that is taken apart
REPEATS, ENOUGH = 4, 0.3  # runs of a block, and seconds after which two will do


Edge = tuple[Node, int]  # an operation, and which of the tensors that it made


@dataclass
class Call:
    """One call of a module in a forward, and those inside of it."""

    name: str
    module: nn.Module
    inside: list[Call] = field(default_factory=list)
    own: int = 0  # bytes saved by its own code, not by the modules that it calls
    all: int = 0  # with theirs
    kept: dict[int, int] = field(default_factory=dict)  # the storages that its own code saved first, and their bytes
    loose: int = 0  # bytes of what it is given that is no output of a module just as it is: code between made it
    writes: bool = False  # does it change what it is given in place?
    args: Any = ()
    kwargs: Any = None
    made: list[Tensor] = field(default_factory=list)
    handed: set[Edge] = field(default_factory=set)  # where the tensors that it is given come from in autograd's graph
    times: tuple[int, int] = (0, 0)  # when it began and ended, as autograd numbers the operations of a forward
    turns: tuple[int, int] = (0, 0)  # and as calls begin and end, one after the other
    aside: list[Call] = field(default_factory=list)  # in the whole forward, those that were made without gradients


@dataclass(frozen=True)
class Probe:
    """The blocks of a model in the order of their calls."""

    blocks: list[Block]
    writes: list[str]  # names of those that change what they are given in place

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.blocks]


def probes(step: Step, *, timed: bool = True) -> list[Probe]:
    """A coarse one, whose segments hold nothing but their borders, and a fine one, if the model has both.

    timed: without it nothing is run for real, and every block is said to take a second.
    """

    def both(root: Call, _: Any) -> list[list[Call]]:
        coarse, fine = apart(root, _chained), apart(root, lambda _: True)
        return [coarse] if [c.name for c in coarse] == [c.name for c in fine] else [coarse, fine]

    return probed(step, both, timed=timed)


Divide = Callable[[Call, Callable[[], Call]], list[list[Call]]]


def probed(step: Step, divide: Divide, *, timed: bool) -> list[Probe]:
    """divide: a forward, and what makes the same with nothing frozen -> one or more rows of calls."""
    fakes = Fakes(step)
    with random_kept(), torch.enable_grad():
        known: dict[Any, Block] = {}
        return [_probed(calls, fakes, known, timed) for calls in divide(_calls(fakes), partial(_thawed, fakes))]


def _thawed(fakes: Fakes) -> Call:
    frozen = [p for p in fakes.model.parameters() if p.is_floating_point() and not p.requires_grad]
    for p in frozen:
        p.requires_grad_()
    try:
        return _calls(fakes)
    finally:
        for p in frozen:
            p.requires_grad_(False)


# --- taking apart ---------------------------------------------------------------------------------
def _calls(fakes: Fakes) -> Call:
    """Run a forward without data, and see which modules are called, and where what is saved comes from."""
    root = Call("", fakes.model)
    stack = [root]
    own = {p.untyped_storage()._cdata for p in itertools.chain(fakes.model.parameters(), fakes.model.buffers())}
    seen = set(own)
    outputs: dict[int, tuple[Tensor, int]] = {}  # by id, of all calls so far, with their versions
    turns = itertools.count()

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage()._cdata not in seen:
            seen.add(t.untyped_storage()._cdata)
            stack[-1].own += t.untyped_storage().nbytes()
            stack[-1].kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    def around(name: str, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # what is called without gradients is in no segment
            out = inner(*args, **kwargs)
            root.aside.append(Call(name, module, made=tensors_of(out), turns=(next(turns), next(turns))))
            return out
        args, kwargs = without_caches(args, kwargs)
        given = tensors_of((args, kwargs))
        versions = [t._version for t in given]
        call = Call(name, module, args=args, kwargs=kwargs)
        made = [t for t in given if t.grad_fn is not None]
        call.handed = {(t.grad_fn, t.output_nr) for t in made if t.grad_fn is not None}
        call.loose = bytes_of(t for t in made if outputs.get(id(t), (t, -1))[1] != t._version)
        stack[-1].inside.append(call)
        stack.append(call)
        began, turn = _get_sequence_nr(), next(turns)
        out = inner(*args, **kwargs)
        call.times, call.turns = (began, _get_sequence_nr()), (turn, next(turns))
        stack.pop()
        call.made = tensors_of(out)
        call.writes = versions != [t._version for t in given]
        outputs.update({id(t): (t, t._version) for t in call.made})
        return out

    for name, module in named_modules(fakes.model):
        wrap(module, Layer.REPLAY, partial(around, name))
    assert fakes.engine  # its hooks are there
    with fakes.mode, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        root.made = tensors_of(fakes.model(*fakes.args, **fakes.kwargs))
    unwrap(fakes.model)
    _sum_up(root)
    return root


def _sum_up(call: Call) -> int:
    call.all = call.own + sum(map(_sum_up, call.inside))
    return call.all


def apart(root: Call, allowed: Callable[[Call], bool]) -> list[Call]:
    """Take the call that saves most apart, then the next, as long as little is saved between the pieces."""
    order = {id(call): i for i, call in enumerate(walk(root))}
    found: list[Call] = []
    waiting = [(-root.all, 0, root)]
    while waiting:
        _, _, call = heapq.heappop(waiting)
        few = len(found) + len(waiting) + len(call.inside) < MOST
        if call is root or (call.inside and few and call.own <= LITTLE * root.all and allowed(call)):
            for c in call.inside:
                heapq.heappush(waiting, (-c.all, order[id(c)], c))
        else:
            found.append(call)
    return sorted(found, key=lambda c: order[id(c)])


def _chained(call: Call) -> bool:
    """Does each of the calls inside hand what it made to the next, as it is, and to no other?"""
    for before, after in itertools.pairwise(call.inside):
        given = {id(t) for t in tensors_of((after.args, after.kwargs)) if t.grad_fn is not None}
        if after.loose or not given <= {id(t) for t in before.made}:
            return False
    return True


def walk(call: Call) -> Iterator[Call]:
    yield call
    for inner in call.inside:
        yield from walk(inner)


# --- what each costs ------------------------------------------------------------------------------
def _probed(calls: list[Call], fakes: Fakes, known: dict[Any, Block], timed: bool) -> Probe:
    makers: dict[int, int] = {}  # by the id of a tensor: the call that returned it
    kept: set[int] = set()  # storages that calls so far have saved
    found = []
    for number, call in enumerate(calls):
        given = tensors_of((call.args, call.kwargs))
        reads = {id(t): (makers[id(t)], id(t), t.untyped_storage().nbytes()) for t in given if id(t) in makers}
        storages = {t.untyped_storage()._cdata for t in given}
        saved = {key: bytes_ for inner in walk(call) for key, bytes_ in inner.kept.items()}
        key = _signature(call)
        if key not in known:
            known[key] = _cost(call, fakes, timed)
        found.append(
            replace(
                known[key],
                name=call.name,
                input=sum(bytes_ for _, _, bytes_ in reads.values()) + call.loose,
                takes=sum(bytes_ for key, bytes_ in saved.items() if key in storages),
                saved=sum(bytes_ for key, bytes_ in saved.items() if key not in storages),
                loose=call.loose,
                ready=bool(storages) and storages <= kept,
                reads=tuple(reads.values()),
            )
        )
        kept |= saved.keys()
        makers |= {id(t): number for t in call.made}
    return Probe(found, sorted({call.name for call in calls if call.writes}))


def _signature(call: Call) -> Any:
    shapes = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_of((call.args, call.kwargs)))
    inside = tuple((n, type(m), m.extra_repr()) for n, m in call.module.named_modules())
    weights = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in call.module.named_parameters())
    others = repr([a for a in (*call.args, *(call.kwargs or {}).items()) if not isinstance(a, Tensor)])[:200]
    return inside, weights, shapes, others


def _cost(call: Call, fakes: Fakes, timed: bool) -> Block:
    insides = Insides(fakes.step.device)
    bytes_ = _bytes(call, fakes, insides)
    if insides.measure():
        bytes_ = _bytes(call, fakes, insides)
    passing, keeping, undoing = bytes_
    forward, backward = _seconds(call, fakes) if timed else (1.0, 1.0)
    gradients = 0 if fakes.step.kept_gradients else sum(p.nbytes for p in call.module.parameters() if p.requires_grad)
    return Block("", forward, backward, 0, 0, 0, passing, keeping, undoing, gradients)


def _bytes(call: Call, fakes: Fakes, insides: Insides) -> tuple[int, int, int]:
    """On tensors without data: passing, keeping, undoing."""
    with fakes.mode, Tracker(insides) as tracker:
        args, kwargs = map_tensors(_leaf, (call.args, call.kwargs))
        for t in (*call.module.parameters(), *call.module.buffers(), *tensors_of((args, kwargs))):
            tracker.see(t)
        start = tracker.live
        tracker.reset()
        with torch.no_grad(), fakes.contexts():
            call.module(*args, **kwargs)
        passing = tracker.peak - start
        tracker.reset()
        with fakes.contexts():
            roots = [t for t in tensors_of(call.module(*args, **kwargs)) if t.requires_grad]
        keeping = tracker.peak - start
        before = tracker.live
        tracker.reset()
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        undoing = tracker.peak - before - sum(p.nbytes for p in call.module.parameters() if p.grad is not None)
        for p in call.module.parameters():
            p.grad = None
    return passing, keeping, max(undoing, 0)


def _seconds(call: Call, fakes: Fakes) -> tuple[float, float]:
    """Forward and backward for real, of a copy."""
    device = fakes.step.device
    module = _real_copy(call.module, fakes)
    times: list[tuple[float, float]] = []
    while len(times) < 2 or (len(times) < REPEATS and sum(map(sum, times)) < ENOUGH):
        args, kwargs = map_tensors(_made_up, (call.args, call.kwargs))
        begun = _now(device)
        with fakes.contexts():
            out = module(*args, **kwargs)
        passed = _now(device)
        roots = [t for t in tensors_of(out) if t.requires_grad]
        grads = [torch.ones_like(t) for t in roots]
        undone = _now(device)
        if roots:
            torch.autograd.backward(roots, grads)
        times.append((passed - begun, _now(device) - undone))
        del out, roots, grads, args, kwargs
    forward, backward = zip(*times, strict=True)
    return min(forward), min(backward)


def _real_copy(fake: nn.Module, fakes: Fakes) -> nn.Module:
    """The block of the user's model, copied: its gradients and statistics stay as they are."""
    back = dict(zip(map(id, fakes.model.modules()), fakes.step.model.modules(), strict=True))
    block = back[id(fake)]
    left = (v for m in block.modules() for v in vars(m).values() if isinstance(v, Tensor))
    memo = {id(value): value.detach().clone() for value in left}  # a tensor with a history cannot be copied
    return without_hooks(copy.deepcopy(block, memo))


def _leaf(t: Tensor) -> Tensor:
    return _like_a_result(torch.empty_like(t.detach()), t.requires_grad)


def _made_up(t: Tensor) -> Tensor:
    return _like_a_result(made_up(t.shape, t.stride(), t.dtype, t.device), t.requires_grad)


def _like_a_result(t: Tensor, requires_grad: bool) -> Tensor:
    """A module may write to what another one returned, and not to a leaf."""
    return t.requires_grad_().clone() if requires_grad else t


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
