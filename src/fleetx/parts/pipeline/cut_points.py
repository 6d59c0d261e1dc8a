"""Finds the modules that a stage may begin with, and where to cut so that stages take equally long.

A stage may begin with a module whose arguments include everything that is read later.

A forward on fake tensors records every module call and the autograd graph, whose operations are numbered in order. An
edge from an operation after the start of a call to one before it would cross the stage boundary. That works only if the
tensor is an argument of that call and is read inside modules that get it as an argument, unchanged: there it can be
replaced with the received tensor. Code between modules would read the old one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from torch import Tensor
from torch.autograd.graph import Node

from fleetx.base import seams
from fleetx.base.trees import tensors_of
from fleetx.engine.context import Context, StepInput
from fleetx.errors import StrategyError
from fleetx.measure.block_profile import BlockProfile, Edge, ModuleCall, profile, split, walk
from fleetx.measure.fake_step import TrainingStep

LEAF = 1 << 63  # autograd gives the nodes that accumulate gradients higher numbers than any operation


# --- balanced stages ------------------------------------------------------------------------------
def balanced_starts(ctx: Context, batch: StepInput, stages: int) -> list[str]:
    """The first module of each stage but the first. Modules are timed one at a time."""
    args, kwargs = batch.arguments
    step = TrainingStep(
        ctx.model, ctx.optimizer, args, kwargs, batch.loss_fn, batch.target,
        parts=[part for part in ctx.plan.parts if part.changes_forward],
    )  # fmt: skip
    profile, starts = find_cut_points(step)
    if len(starts) < stages - 1:
        raise StrategyError(
            f"pipeline: the model can be cut into at most {len(starts) + 1} stages, not {stages}: use fewer ranks, set "
            "pipeline_configs['stages'], or use device_guard"
        )
    times = [block.forward + block.backward for block in profile.blocks]
    sizes = [float(block.saved + block.input_saved) for block in profile.blocks]
    return [starts[i] for i in partition(times, sizes, stages, list(starts))]


def partition(times: Sequence[float], sizes: Sequence[float], stages: int, allowed: Sequence[int]) -> list[int]:
    """Where each stage but the first begins. Minimizes the time of the slowest stage, then the size of the largest."""
    count = len(times)

    def cost(low: int, high: int) -> tuple[float, float]:
        return sum(times[low:high]), sum(sizes[low:high])

    @cache
    def best(low: int, stages: int) -> tuple[tuple[float, float], tuple[int, ...]] | None:
        if stages == 1:
            return cost(low, count), ()
        options = []
        for high in allowed:
            if high > low and (rest := best(high, stages - 1)) is not None:
                (time, size), ends = rest
                mine = cost(low, high)
                options.append(((max(mine[0], time), max(mine[1], size)), (high, *ends)))
        return min(options, default=None)

    chosen = best(0, stages)
    assert chosen is not None
    return list(chosen[1])


# --- possible starts ------------------------------------------------------------------------------
def find_cut_points(step: TrainingStep, *, timed: bool = True) -> tuple[BlockProfile, dict[int, str]]:
    """Profile the model, split wherever a stage may begin. Also returns the outermost module at each such place."""
    starts: dict[int, str] = {}
    passed: list[int] = []  # bytes of each block's inputs

    def divide(root: ModuleCall, unfrozen: Callable[[], ModuleCall]) -> list[list[ModuleCall]]:
        frozen = any(not p.requires_grad for p in step.model.parameters())
        possible = possible_starts(root, unfrozen() if frozen else root)
        row = split(root, lambda call: any(c.ops[0] > call.ops[0] for c in walk(call) if id(c) in possible))
        names = {call.ops[0]: call.name for call in reversed([*walk(root)]) if id(call) in possible}
        for number, call in enumerate(row):
            # A module without operations begins where the next one does: two blocks, but one place to cut.
            if number and id(call) in possible and names[call.ops[0]] not in starts.values():
                starts[number] = names[call.ops[0]]
        inputs = ({id(t): t for t in tensors_of((call.args, call.kwargs)) if t.grad_fn is not None} for call in row)
        passed[:] = [sum(t.nbytes for t in tensors.values()) for tensors in inputs]
        return [row]

    (found,) = profile(step, divide, timed=timed)
    # If code between two blocks computes the input of the second, that is what is sent.
    blocks = [replace(block, input=max(block.input, size)) for block, size in zip(found.blocks, passed, strict=True)]
    return replace(found, blocks=blocks), starts


def possible_starts(root: ModuleCall, unfrozen: ModuleCall) -> set[int]:
    """The ids of the calls that a stage may begin with.

    `unfrozen` is the same forward with nothing frozen: autograd records no edges for frozen parts, but what they
    compute crosses a boundary like anything else.
    """
    calls, twins = _in_order(root), _in_order(unfrozen)
    first = {call.name: call for call in reversed(calls)}  # a name stands for the first call of a module
    no_grad = {call.name for call in root.no_grad}
    impossible = {
        id(call) for call in (*_crossed(unfrozen, twins), *_bypassed(twins, unfrozen.no_grad), *_shared(twins))
    }
    possible = {
        id(call) for call, twin in zip(calls, twins, strict=True)
        if call.sources and first[call.name] is call and call.name not in no_grad and id(twin) not in impossible
    }  # fmt: skip
    return possible - {id(call) for call in _wide(root, possible, len(calls))}


def _in_order(root: ModuleCall) -> list[ModuleCall]:
    return sorted((call for call in walk(root) if call is not root), key=lambda call: call.order)


def _wide(call: ModuleCall, possible: set[int], fewest: int) -> Iterator[ModuleCall]:
    """Calls with more inputs than an enclosing possible start: more would have to be sent."""
    for inner in call.inside:
        if len(inner.sources) > fewest:
            yield inner
        yield from _wide(inner, possible, min(fewest, len(inner.sources)) if id(inner) in possible else fewest)


def _shared(calls: list[ModuleCall]) -> Iterator[ModuleCall]:
    """Calls preceded only by modules that are called again later, and so would be in both stages."""
    last = {call.name: call.order[0] for call in calls}
    ends = sorted((call.order[1], last[call.name]) for call in calls if call.outputs and not call.inside)
    for call in calls:
        if all(again >= call.order[0] for end, again in ends if end < call.order[0]):
            yield call


# --- tensors with a gradient ----------------------------------------------------------------------
def _crossed(root: ModuleCall, calls: list[ModuleCall]) -> Iterator[ModuleCall]:
    """Calls whose start is crossed by a tensor that is not one of their inputs, or that code between modules reads."""
    calls = sorted(calls, key=lambda call: call.ops[0])  # stable: calls that start with the same operation keep order
    begins = [call.ops[0] for call in calls]
    readers: dict[Edge, list[ModuleCall]] = {}
    for call in calls:
        for edge in call.sources:
            readers.setdefault(edge, []).append(call)
    for node, edge in _edges(root.outputs):
        read, made = seams.node_number(node), seams.node_number(edge[0])
        around = [call.ops[0] for call in readers.get(edge, ()) if call.ops[0] <= read < call.ops[1]]
        last = max(around, default=-1)  # a call that starts after all modules that get the tensor cannot replace it
        for call in calls[bisect_right(begins, made) : bisect_right(begins, read)]:
            if edge not in call.sources or call.ops[0] > last:
                yield call


def _edges(outputs: list[Tensor]) -> Iterator[tuple[Node, Edge]]:
    """Everything that is read, and by which operation, except parameters: every stage holds those that it reads."""
    waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for before, number in node.next_functions:
            if before is None or seams.node_number(before) >= LEAF or _is_cast(before):
                continue
            yield node, (before, number)
            if before not in seen:
                seen.add(before)
                waiting.append(before)


def _is_cast(node: Node) -> bool:
    """Is this the cast of a parameter? Autocast caches these for all modules that read the parameter."""
    sources = [before for before, _ in node.next_functions if before is not None]
    return "ToCopy" in node.name() and all(seams.node_number(before) >= LEAF for before in sources)


# --- tensors without a gradient -------------------------------------------------------------------
def _bypassed(calls: list[ModuleCall], no_grad: list[ModuleCall]) -> Iterator[ModuleCall]:
    """Calls that do not get a tensor that is made before them and passed to a later module."""
    made: dict[int, int] = {}
    for call in sorted([*calls, *no_grad], key=lambda call: call.order[1]):
        for t in call.outputs:
            made.setdefault(id(t), call.order[1])
    inputs = [{id(t) for t in tensors_of((call.args, call.kwargs))} for call in calls]
    begins = [call.order[0] for call in calls]
    for reader, ids in enumerate(inputs):
        for key in ids & made.keys():
            for number in range(bisect_left(begins, made[key]), reader):
                if key not in inputs[number]:
                    yield calls[number]
