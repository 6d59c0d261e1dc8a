"""What operations hold while they run and hand to nobody: scratch space, copies in another layout.

Fake tensors know nothing of it. Each operation that may have some is run once for real, with the same shapes, and its
peak is read from the allocator: convolutions on a CPU need a tenth of a ResNet's activations for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fleetx.measure import allocator

LEAST = 1 << 18  # bytes of tensors: what smaller operations hold is of no account
# Operations that may hold something and can be run on made-up values. Others are left alone: one that reads a workspace
# of another (nn.LSTM's backward) would read anything.
_MEASURED = (
    "convolution", "native_batch_norm", "native_layer_norm", "native_group_norm", "_softmax", "_log_softmax",
    "_safe_softmax", "_scaled_dot_product", "max_pool", "avg_pool", "_adaptive_avg_pool", "upsample",
    "embedding_dense_backward", "nll_loss", "cudnn_batch_norm", "cudnn_convolution", "mkldnn_convolution",
)  # fmt: skip

log = logging.getLogger(__name__)
_known: dict[Any, int] = {}


class Insides:
    """`inside(operation, args, kwargs)`, for a tracker: zero where nothing was measured, until `measure`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._asked: dict[Any, tuple[Any, Any, Any]] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> int:
        if not _may_hide(func):
            return 0
        key = _key(func, args, kwargs)
        if key not in _known and key not in self._asked and _bytes(args) >= LEAST:
            self._asked[key] = func, *pytree.tree_map(_described, (args, kwargs or {}))
        return _known.get(key, 0)

    def measure(self) -> bool:
        """Run what was asked for and is not known; was there any?"""
        asked, self._asked = self._asked, {}
        _known.update(
            zip(asked, allocator.peaks([partial(_ready, *call) for call in asked.values()], self._device), strict=True)
        )
        return bool(asked)


def _ready(func: Any, args: Any, kwargs: Any) -> Callable[[], None]:
    real_args, real_kwargs = pytree.tree_map(_real, (args, kwargs))

    def run() -> None:
        try:
            func(*real_args, **real_kwargs)
        except (RuntimeError, IndexError, ValueError):  # it does not like made-up values
            log.debug("%s could not be measured", func)

    return run


def _may_hide(func: Any) -> bool:
    return func.namespace == "aten" and func._schema.name.removeprefix("aten::").startswith(_MEASURED)


class _Tensor:
    """The description of one."""

    def __init__(self, t: Tensor):
        self.about = tuple(t.shape), t.stride(), t.dtype, t.device

    def make(self) -> Tensor:
        return made_up(*self.about)


def made_up(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of these strides, which may be zero: it need not have as many values as elements."""
    values = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    flat = torch.zeros(values, dtype=dtype, device=device)
    return (flat.normal_() if dtype.is_floating_point else flat).as_strided(shape, stride)


def _described(leaf: Any) -> Any:
    return _Tensor(leaf) if isinstance(leaf, Tensor) else leaf


def _real(leaf: Any) -> Any:
    return leaf.make() if isinstance(leaf, _Tensor) else leaf


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    return func, *(_Tensor(x).about if isinstance(x, Tensor) else repr(x) for x in leaves)


def _bytes(args: Any) -> int:
    return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(args) if isinstance(x, Tensor))
