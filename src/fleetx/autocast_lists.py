"""Operations that autocast must run in float32 (black) or in half precision (white), beyond its own lists.

torch.autocast decides by operation in C++ and takes no list from outside. So the kernel of each listed operation is
overridden where autocast dispatches: every way of calling it is covered, from `F.softmax` to C++ composites. The
override acts only inside `listed(...)`; elsewhere it hands over to what was there before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# What Paddle calls these operations, where PyTorch says it differently.
PADDLE_OPERATIONS = {
    "mul": "linear",
    "matmul_v2": "matmul",
    "lookup_table": "embedding",
    "lookup_table_v2": "embedding",
    "cross_entropy": "cross_entropy_loss",
    "cross_entropy2": "cross_entropy_loss",
    "softmax_with_cross_entropy": "cross_entropy_loss",
    "sigmoid_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
    "elementwise_add": "add",
    "elementwise_sub": "sub",
    "elementwise_mul": "multiply",
    "elementwise_div": "div",
    "reduce_sum": "sum",
    "reduce_mean": "mean",
}


@dataclass(frozen=True)
class _Lists:
    white: frozenset[str]
    black: frozenset[str]
    half: torch.dtype


_active: list[_Lists] = []  # innermost last
_overridden: set[tuple[str, str]] = set()  # (operation, dispatch key): an override stays, because others may use it
_library: torch.library.Library | None = None


def operation(name: str) -> str | None:
    """PyTorch's name of an operation that is given by PyTorch's or by Paddle's name; None if there is no such one."""
    name = PADDLE_OPERATIONS.get(name, name)
    return name if name.isidentifier() and hasattr(torch.ops.aten, name) else None


def override(names: Collection[str], device: torch.device) -> None:
    """Make the operations listen to `listed`."""
    for name in names:
        key = f"Autocast{device.type.upper()}"
        if (name, key) not in _overridden:
            _overridden.add((name, key))
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                if "out" not in overload:
                    _override(getattr(packet, overload), name, key)


@contextmanager
def listed(white: Collection[str], black: Collection[str], half: torch.dtype) -> Iterator[None]:
    """While this is open, white operations run in `half` and black ones in float32, wherever autocast is on."""
    _active.append(_Lists(frozenset(white), frozenset(black), half))
    try:
        yield
    finally:
        _active.pop()


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Cast the float32, float16 and bfloat16 tensors in a structure; leave float64 and everything else alone."""
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype in kinds else t, value)


def _override(op: torch._ops.OpOverload, name: str, key: str) -> None:
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
    full = f"{op._schema.name}.{op._overloadname}" if op._overloadname != "default" else op._schema.name
    before: Callable[..., Any] | None = None
    if torch._C._dispatch_has_kernel_for_dispatch_key(full, key):
        before = torch.library.get_kernel(full, key).call_boxed
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        lists = _active[-1] if _active else None
        if lists is not None and name in lists.white | lists.black:
            dtype = lists.half if name in lists.white else torch.float32
            args, kwargs = to_dtype((args, kwargs), dtype)
        elif before is not None:
            return before(keys, *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(below):
            return op(*args, **kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # to override is the intention
        _library.impl(full, kernel, key, with_keyset=True, allow_override=True)
