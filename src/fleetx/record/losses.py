"""The loss of a script that calls `loss.backward()`: nothing else shows it to the engine.

`Tensor.backward` calls `torch.autograd.backward`, which is replaced as long as something is recorded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from fleetx.base import seams


class Losses:
    def __init__(self) -> None:
        self.last: Tensor | None = None  # the root of the last backward, if it was one number
        self._plain = torch.autograd.backward

        @functools.wraps(self._plain)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            root = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
            if isinstance(root, Tensor) and root.numel() == 1:
                self.last = root.detach()
            if not seams.profiler_enabled():
                return self._plain(tensors, *args, **kwargs)
            with record_function("fleetx backward"):
                return self._plain(tensors, *args, **kwargs)

        self._ours = backward
        torch.autograd.backward = backward

    def take(self) -> Tensor | None:
        found, self.last = self.last, None
        return found

    def close(self) -> None:
        if torch.autograd.backward is self._ours:  # else somebody has replaced it since, and keeps calling ours
            torch.autograd.backward = self._plain
