"""Counts the bytes of the tensors that are alive, operation by operation. With fake tensors nothing is computed.

What an operation holds while it runs and hands to nobody is not seen: `inside` tells it, where it was measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Inside = Callable[[Any, Any, Any], int]  # operation, args, kwargs: the most that is there at once besides its inputs


class Tracker(TorchDispatchMode):
    """`live` and `peak`, in bytes, of all storages that were seen."""

    def __init__(self, inside: Inside | None = None):
        super().__init__()
        self.live = self.peak = 0
        self._inside = inside
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.live
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        if self._inside is not None:
            self.peak = max(self.peak, before + self._inside(func, args, kwargs))
        return out

    def see(self, tensor: Tensor) -> None:
        """Count a tensor that is there, once for its storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def gone(_: Any, known: dict[int, Any] = self._known) -> None:
            known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, gone), size
        self.live += size
        self.peak = max(self.peak, self.live)

    def reset(self) -> None:
        """From here on, the most that there is."""
        self.peak = self.live


def bytes_of(tensors: Any) -> int:
    """Of all storages, each once."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)
