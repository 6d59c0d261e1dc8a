"""Count what a training step does on this rank, from outside: nothing here knows the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from fleetx.base.seams import TorchDispatchMode, pytree
from fleetx.comm import kernel

FIRST = 3  # count from this step on: a strategy may stop acting after the first


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sent_since(before: dict[int, int], files: dict[int, int] | None = None) -> int:
    """Count by connection, because those of an earlier run may have closed since. files: for `kernel.bytes_sent`."""
    return sum(sent - before.get(inode, 0) for inode, sent in kernel.bytes_sent(files).items())


class _Collectives(TorchDispatchMode):
    """Counts the bytes of collectives on devices that do not communicate over TCP."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.total += sum(t.nbytes for t in pytree.tree_leaves(args) if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


_COUNTED = ("calls", "half_outputs", "gradient_norm")  # counted while a step runs


class Observer:
    """Quantities of the steps of one run. Call `before` and `after` around each step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        averaged: Callable[[], AbstractContextManager[None]] | None = None,
        measured: Callable[[], int] | None = None,
    ):
        """averaged: a context with averaged parameters. measured: returns how often norms have been measured."""
        self._model, self._device, self._averaged, self._measured = model, device, averaged, measured
        self._number = 0
        self._files: dict[int, int] | None = None  # of the connections that the last step left
        self._collectives = _Collectives()
        self._counts = dict.fromkeys(_COUNTED, 0.0)
        self.steps: list[dict[str, float]] = []  # what was counted in each step from FIRST on
        optimizer.register_step_pre_hook(self._see_gradients)

    @contextmanager
    def observing(self) -> Iterator[None]:
        handle = register_module_forward_hook(self._see_module)
        try:
            if self._device.type == "cpu":
                yield
            else:
                with self._collectives:
                    yield
        finally:
            handle.remove()

    def _see_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if next(module.children(), None) is None and next(module.parameters(), None) is not None:
            self._counts["calls"] += 1
            if isinstance(output, Tensor) and output.dtype in (torch.float16, torch.bfloat16):
                self._counts["half_outputs"] += 1

    def _see_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        grads = [local(p.grad).double() for p in self._params() if p.grad is not None]
        self._counts["gradient_norm"] += sum(float(g.square().sum()) for g in grads) ** 0.5

    def _params(self) -> list[Tensor]:
        return [p for p in self._model.parameters() if p.device.type != "meta"]

    def before(self) -> None:
        self._old = [local(p.detach()).clone() for p in self._params()]
        self._counts = dict.fromkeys(_COUNTED, 0.0)
        # No connections are made between two steps, so those that `after` found are enough.
        self._before = kernel.bytes_sent(self._files) if self._device.type == "cpu" else {}
        self._collectives.total = 0
        self._before_it = self._measurements()

    def after(self) -> None:
        if self._device.type == "cpu":
            self._files = kernel.tcp_files()
            sent = sent_since(self._before, self._files)
        else:
            sent = self._collectives.total
        self._number += 1
        if self._number < FIRST:
            return
        new = [local(p.detach()) for p in self._params()]
        moved = sum(float((a - b).double().square().sum()) for a, b in zip(new, self._old, strict=True)) ** 0.5
        self.steps.append(
            self._counts
            | {
                "bytes_sent": float(sent),
                "updates": float(moved > 0),
                "distance": moved,
                "bytes_held": float(sum(p.nbytes for p in new)),
                "checksum": sum(float(p.double().abs().sum()) for p in new),
                "behind": self._behind(),
                "measured": float(self._measurements() - self._before_it),
            }
        )

    def _measurements(self) -> int:
        return 0 if self._measured is None else self._measured()

    def _behind(self) -> float:
        """The distance between the parameters and their average."""
        if self._averaged is None:
            return 0.0
        now = [local(p.detach()).clone() for p in self._params()]
        with self._averaged():
            pairs = zip(now, self._params(), strict=True)
            return sum(float((a - local(b.detach())).double().square().sum()) for a, b in pairs) ** 0.5
