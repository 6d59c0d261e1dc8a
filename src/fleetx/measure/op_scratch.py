"""Memory that operations allocate internally and free before they return: workspaces, copies in another layout.

Fake tensors do not show it, so each operation that may need some is run once for real, with the same shapes, and its
peak is read from the allocator. On a CPU, the convolutions of a ResNet need a tenth of its activations as scratch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fleetx.base import seams
from fleetx.base.seams import pytree
from fleetx.measure import allocator

Result = TypeVar("Result")
SMALLEST = 1 << 18  # bytes of arguments: the scratch of smaller operations is negligible
# Operations that may need scratch and can be run on made-up values. Others are not measured: one that reads the
# workspace of another (the backward of nn.LSTM) would read garbage.
_MEASURED = (
    "convolution", "native_batch_norm", "native_layer_norm", "native_group_norm", "_softmax", "_log_softmax",
    "_safe_softmax", "_scaled_dot_product", "max_pool", "avg_pool", "_adaptive_avg_pool", "upsample",
    "embedding_dense_backward", "nll_loss", "cudnn_batch_norm", "cudnn_convolution", "mkldnn_convolution",
)  # fmt: skip

log = logging.getLogger(__name__)
_known: dict[Any, int] = {}


def with_scratch(device: torch.device, run: Callable[[OpScratch], Result]) -> Result:
    """Return `run(scratch)`. If it met operations that had not been measured yet, measure them and run it again."""
    scratch = OpScratch(device)
    result = run(scratch)
    return run(scratch) if scratch.measure() else result


class OpScratch:
    """For `Tracker`: peak bytes of an operation if it was measured, else 0 until `measure` is called."""

    def __init__(self, device: torch.device):
        self._device = device
        self._missing: dict[Any, tuple[Any, Any, Any]] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> int:
        if func.namespace != "aten" or not seams.schema(func).name.removeprefix("aten::").startswith(_MEASURED):
            return 0
        leaves = pytree.tree_leaves((args, kwargs))
        key = func, *(_Like(x).about if isinstance(x, Tensor) else repr(x) for x in leaves)
        if key not in _known and key not in self._missing and _size(args) >= SMALLEST:
            described = pytree.tree_map_only(Tensor, _Like, (args, kwargs or {}))
            self._missing[key] = func, *described
        return _known.get(key, 0)

    def measure(self) -> bool:
        """Measure the operations that were missing. Returns whether there were any."""
        missing, self._missing = self._missing, {}
        found = allocator.peaks([partial(_prepare, *call) for call in missing.values()], self._device)
        _known.update(zip(missing, found, strict=True))
        return bool(missing)


def _prepare(func: Any, args: Any, kwargs: Any) -> Callable[[], None]:
    real_args, real_kwargs = pytree.tree_map_only(_Like, lambda like: random_tensor(*like.about), (args, kwargs))

    def run() -> None:
        try:
            func(*real_args, **real_kwargs)
        except (RuntimeError, IndexError, ValueError):  # it cannot take made-up values
            log.debug("%s could not be measured", func)

    return run


class _Like:
    """The description of a tensor."""

    def __init__(self, t: Tensor):
        self.about = tuple(t.shape), t.stride(), t.dtype, t.device


def random_tensor(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor with these strides. Integers are 0, which is valid as an index and as a label."""
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    flat = torch.zeros(size, dtype=dtype, device=device)
    return (flat.normal_() if dtype.is_floating_point else flat).as_strided(shape, stride)


def _size(args: Any) -> int:
    return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(args) if isinstance(x, Tensor))
