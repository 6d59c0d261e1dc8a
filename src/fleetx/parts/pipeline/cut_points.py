"""Where a stage may begin: with a module past which nothing is read but what this module is handed.

A forward on tensors without data shows every call of a module, and the graph that autograd makes of it, whose
operations are numbered in their order. An edge of it that leads from an operation after the beginning of a call to one
before it would cross the border. It may, if the tensor is handed to that call, and is read inside of modules to which
it is handed as it is: there it can be replaced by the one that was received. Code between modules would read the old.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor
from torch.autograd.graph import Node

from fleetx.base.trees import tensors_of
from fleetx.measure.block_profile import Call, Edge, Probe, apart, probed, walk
from fleetx.measure.fake_step import Step

LEAF = 1 << 63  # autograd numbers what gathers the gradients of parameters higher than any operation


def pieces(step: Step, *, timed: bool = True) -> tuple[Probe, dict[int, str]]:
    """The model, taken apart wherever a stage may begin; and with which pieces one may, named by the outermost."""
    starts: dict[int, str] = {}
    handed: list[int] = []

    def divide(root: Call, thawed: Callable[[], Call]) -> list[list[Call]]:
        found = places(root, thawed() if any(not p.requires_grad for p in step.model.parameters()) else root)
        row = apart(root, lambda call: any(c.times[0] > call.times[0] for c in walk(call) if id(c) in found))
        names = {call.times[0]: call.name for call in reversed([*walk(root)]) if id(call) in found}
        for number, call in enumerate(row):
            # A module that does nothing begins where the next one does: two numbers, and one place.
            if number and id(call) in found and names[call.times[0]] not in starts.values():
                starts[number] = names[call.times[0]]
        given = ({id(t): t for t in tensors_of((call.args, call.kwargs)) if t.grad_fn is not None} for call in row)
        handed[:] = [sum(t.nbytes for t in tensors.values()) for tensors in given]
        return [row]

    (made,) = probed(step, divide, timed=timed)
    # What code between the pieces made of what one of them returned is sent like that itself.
    blocks = [replace(block, input=max(block.input, bytes_)) for block, bytes_ in zip(made.blocks, handed, strict=True)]
    return replace(made, blocks=blocks), starts


def places(root: Call, whole: Call) -> set[int]:
    """The ids of the calls with which a stage may begin. `whole` is a forward in which nothing is frozen: autograd's
    graph has no edges for what is, and that crosses a border like anything else."""
    calls, shown = _in_order(root), _in_order(whole)
    first = {call.name: call for call in reversed(calls)}  # a name stands for the first call of a module
    aside = {call.name for call in root.aside}
    refused = {id(call) for call in (*_crossed(whole, shown), *_passed(shown, whole.aside), *_shared(shown))}
    possible = {
        id(call) for call, twin in zip(calls, shown, strict=True)
        if call.handed and first[call.name] is call and call.name not in aside and id(twin) not in refused
    }  # fmt: skip
    return possible - {id(call) for call in _wide(root, possible, len(calls))}


def _in_order(root: Call) -> list[Call]:
    return sorted((call for call in walk(root) if call is not root), key=lambda call: call.turns)


def _wide(call: Call, possible: set[int], most: int) -> Iterator[Call]:
    """Those that are handed more tensors than where a stage may begin around them: more would have to be sent."""
    for inner in call.inside:
        if len(inner.handed) > most:
            yield inner
        yield from _wide(inner, possible, min(most, len(inner.handed)) if id(inner) in possible else most)


def _shared(calls: list[Call]) -> Iterator[Call]:
    """Those before which no module is called but such as are called later too: these run in both stages."""
    last = {call.name: call.turns[0] for call in calls}
    ends = sorted((call.turns[1], last[call.name]) for call in calls if call.made and not call.inside)
    for call in calls:
        if all(again >= call.turns[0] for end, again in ends if end < call.turns[0]):
            yield call


# --- what has a gradient --------------------------------------------------------------------------
def _crossed(root: Call, calls: list[Call]) -> Iterator[Call]:
    """Those across whose beginning something is read that they are not handed, or that code between modules reads."""
    calls = sorted(calls, key=lambda call: call.times[0])  # which keeps the order of those that begin at one time
    begins = [call.times[0] for call in calls]
    given: dict[Edge, list[Call]] = {}
    for call in calls:
        for edge in call.handed:
            given.setdefault(edge, []).append(call)
    for node, edge in _edges(root.made):
        at, made = node._sequence_nr(), edge[0]._sequence_nr()
        inside = [call.times[0] for call in given.get(edge, ()) if call.times[0] <= at < call.times[1]]
        last = max(inside, default=-1)  # whoever begins later than all modules that are handed it cannot replace it
        for call in calls[bisect_right(begins, made) : bisect_right(begins, at)]:
            if edge not in call.handed or call.times[0] > last:
                yield call


def _edges(outputs: list[Tensor]) -> Iterator[tuple[Node, Edge]]:
    """All that is read, and by which operation. Parameters are there in every stage that reads them."""
    waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for before, number in node.next_functions:
            if before is None or before._sequence_nr() >= LEAF or _cast(before):
                continue
            yield node, (before, number)
            if before not in seen:
                seen.add(before)
                waiting.append(before)


def _cast(node: Node) -> bool:
    """Autocast keeps the casts of parameters for all modules that read them."""
    sources = [before for before, _ in node.next_functions if before is not None]
    return "ToCopy" in node.name() and all(before._sequence_nr() >= LEAF for before in sources)


# --- what has none --------------------------------------------------------------------------------
def _passed(calls: list[Call], aside: list[Call]) -> Iterator[Call]:
    """Those that are not handed what an earlier module made and a later one is handed."""
    made: dict[int, int] = {}
    for call in sorted([*calls, *aside], key=lambda call: call.turns[1]):
        for t in call.made:
            made.setdefault(id(t), call.turns[1])
    handed = [{id(t) for t in tensors_of((call.args, call.kwargs))} for call in calls]
    turns = [call.turns[0] for call in calls]
    for reader, ids in enumerate(handed):
        for key in ids & made.keys():
            for number in range(bisect_left(turns, made[key]), reader):
                if key not in handed[number]:
                    yield calls[number]
