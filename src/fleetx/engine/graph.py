"""The autograd graph of the running backward: what it was asked for, and which nodes it reaches."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fleetx.base import seams

Node = Any
_BACKWARD, _GRAD = torch.autograd.backward.__code__, torch.autograd.grad.__code__


@dataclass(frozen=True)
class Call:
    """A call to torch.autograd.backward, which Tensor.backward calls, or to torch.autograd.grad."""

    roots: list[Node]  # where it begins
    wanted: list[Node]  # whose gradients it was asked for; empty: those of all leaves


def running() -> Call | None:
    """The call that started the running backward; None if it was not started from Python."""
    frame = _find(sys._getframe(1))
    if frame is None:  # on a GPU, nodes run in their own thread, while the caller waits
        frame = next(filter(None, map(_find, sys._current_frames().values())), None)
    if frame is None:
        return None
    given = frame.f_locals
    return Call(_nodes(given["tensors" if frame.f_code is _BACKWARD else "outputs"]), _nodes(given["inputs"]))


def _find(frame: FrameType) -> FrameType | None:
    return next((each for each, _ in walk_stack(frame) if each.f_code in (_BACKWARD, _GRAD)), None)


def _nodes(given: Any) -> list[Node]:
    each = [given] if isinstance(given, Tensor | torch.autograd.graph.GradientEdge) else given or ()
    edges = [torch.autograd.graph.get_gradient_edge(t) if isinstance(t, Tensor) else t for t in each]
    return [edge.node for edge in edges]


def before(starts: Iterable[Node], stop: Callable[[Node], bool] | None = None) -> Iterator[Node]:
    """These nodes and all that backward reaches from them, nearest first, but none beyond a node at which to `stop`."""
    seen, waiting = set[Node](), deque(starts)
    while waiting:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if stop is None or not stop(node):
            waiting.extend(following for following, _ in node.next_functions)


def all_before(starts: Iterable[Node], wanted: Collection[Node]) -> bool:
    """Does backward reach all the wanted nodes from these?"""
    missing = set(wanted)
    for node in before(starts):
        missing.discard(node)
        if not missing:
            return True
    return not missing


def after_backward(call: Callable[[], None]) -> None:
    """Call this when the running backward has ended, after DDP's own callback has finished its reduction."""
    queue = seams.backward_engine.queue_callback
    queue(lambda: queue(call))
