"""Hooks that copies of a model do not carry, and hooks that fire once per step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.errors import UsageError


class Hook:
    """A hook that becomes a no-op in a copy or a pickle of the model, so that those are plain models."""

    def __init__(self, call: Any):
        self.call = call

    @seams.disable_dynamo  # a model compiled after `distribute` must not trace it
    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _make_nothing, ()


def _nothing(*args: Any) -> None:
    """What a copy of the model has instead of the engine's hooks."""


def _make_nothing() -> Any:
    return _nothing


torch.serialization.add_safe_globals([_make_nothing])  # torch.load(weights_only=True) reads a pickle of the whole model


class OuterStep:
    """An optimizer whose step() calls super().step() fires torch's hooks twice: only the outer call counts."""

    def __init__(self, before: Callable[[Any, Any], Any], after: Callable[[], None]):
        self._before, self._after = before, after
        self._running: FrameType | None = None  # the frame of the running step()

    def enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if self._running is not None and any(frame is self._running for frame, _ in walk_stack(caller)):
            return None
        self._running = caller  # not a flag, which would stay set if step() raises
        try:
            with torch.no_grad():
                return self._before(args, kwargs)
        except BaseException:
            self._running = None
            raise

    def leave(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if sys._getframe(1) is self._running:
            self._running = None
            with torch.no_grad():
                self._after()


def run_closure(optimizer: Optimizer, args: Any, kwargs: Any, after: Callable[[], None] | None = None) -> Any:
    """step(closure) computes gradients inside the step: run the closure first, and pass its loss to the optimizer.

    after: given if nothing needs the gradients before the step. Then the optimizer may call its closure as it likes,
    and `after` is called after each call.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None

    def put(changed: Callable[[], Any]) -> Any:
        return ((args[0], changed, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": changed})

    if after is not None:
        return put(partial(_call_both, closure, after))
    with torch.enable_grad():
        losses = [closure()]
    versions = _versions(optimizer)

    def once() -> Any:
        name = type(optimizer).__name__
        if not losses:
            raise UsageError(
                f"{name} calls its closure more than once per step, which is not supported: use an optimizer that "
                "calls it once"
            )
        if _versions(optimizer) != versions:
            raise UsageError(
                f"{name} changes the parameters before it calls its closure, but a strategy needs the gradients before "
                "the step: call its two steps, each after a backward(), instead of step(closure)"
            )
        return losses.pop()

    return put(once)


def _call_both(closure: Callable[[], Any], after: Callable[[], None]) -> Any:
    loss = closure()
    with torch.no_grad():
        after()
    return loss


def _versions(optimizer: Optimizer) -> list[int]:
    return [seams.version(p) for group in optimizer.param_groups for p in group["params"]]
