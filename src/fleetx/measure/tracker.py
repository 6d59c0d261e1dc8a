"""Counts the bytes of live tensors, operation by operation. Works on fake tensors, so nothing needs to be computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from fleetx.base import seams
from fleetx.base.seams import TorchDispatchMode, pytree

Scratch = Callable[[Any, Any, Any], int]  # operation, args, kwargs -> its peak bytes, apart from its inputs


class Tracker(TorchDispatchMode):
    """`live` and `peak`: bytes of all storages seen so far. `scratch` adds what operations allocate internally."""

    def __init__(self, scratch: Scratch | None = None):
        super().__init__()
        self.live = self.peak = 0
        self._scratch = scratch
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.live
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        if self._scratch is not None:
            self.peak = max(self.peak, before + self._scratch(func, args, kwargs))
        return out

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = tensor.untyped_storage()
        key = seams.storage_id(storage)
        if key in self._known:
            return
        size = storage.nbytes()

        def freed(_: Any, known: dict[int, Any] = self._known) -> None:
            known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, freed), size
        self.live += size
        self.peak = max(self.peak, self.live)

    def ignore(self, tensor: Tensor) -> None:
        """Never count this storage."""
        storage = tensor.untyped_storage()
        self._known[seams.storage_id(storage)] = weakref.ref(storage), 0

    def reset(self) -> None:
        """Start a new peak from what is live now."""
        self.peak = self.live


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Total bytes, each storage counted once."""
    return sum({seams.storage_id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())
