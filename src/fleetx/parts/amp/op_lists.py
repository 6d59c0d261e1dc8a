"""Operations that autocast runs in float32 (black) or half precision (white), in addition to its own lists.

torch.autocast keeps its lists in C++ and accepts no others. So the kernel of each listed operation is overridden at the
autocast dispatch key, which covers every way to call it, from `F.softmax` to C++ composites. The override takes effect
only inside `active(...)`; elsewhere it calls the previous kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fleetx.base import seams

# Paddle's names of operations, where they differ from PyTorch's.
PADDLE_OPERATIONS = {
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

# Operations that autocast sees under several names: nn.Linear calls `linear`, and what `linear` calls is already cast.
SEVERAL = {"matmul_v2": ("matmul", "linear"), "addmm": ("addmm", "linear")}

# Names with different meanings in Paddle and PyTorch.
UNKNOWN = "is neither a module of the model nor an operation of torch"
AMBIGUOUS = {"mul": "is a matrix product in Paddle but elementwise in PyTorch: use 'linear' or 'multiply'"}
# These update running statistics in place, although their schemas do not declare it.
UPDATES_BUFFERS = {"batch_norm", "native_batch_norm", "instance_norm", "cudnn_batch_norm", "miopen_batch_norm"}


_active: list[dict[str, torch.dtype]] = []  # the dtype to cast to, by operation; innermost last
_overridden: set[tuple[str, str]] = set()  # (operation, dispatch key); never undone, because other models may use it
_library: torch.library.Library | None = None


def torch_names(name: str) -> tuple[str, ...]:
    """PyTorch's names of an operation, given PyTorch's or Paddle's."""
    return SEVERAL.get(name, (PADDLE_OPERATIONS.get(name, name),))


def unsupported(name: str) -> str:
    """Why an operation of this name cannot be listed; empty if it can."""
    if name in AMBIGUOUS:
        return AMBIGUOUS[name]
    name = torch_names(name)[0]
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, seams.OpOverloadPacket):
        return UNKNOWN
    if name in UPDATES_BUFFERS or any(seams.schema(o).is_mutable for o in _overloads(packet)):
        return "changes its arguments in place, which a cast would lose: list the module instead"
    return ""


def override(names: Collection[str], device: torch.device) -> None:
    """Install the overrides that `active` controls."""
    key = f"Autocast{device.type.upper()}"
    for name in names:
        if (name, key) not in _overridden:
            for overload in _overloads(getattr(torch.ops.aten, name)):
                _override(overload, name, key)
            _overridden.add((name, key))


def _overloads(packet: Any) -> list[Any]:
    """Overloads that the dispatcher knows (TorchScript has more), without the `out` variants."""
    found = [getattr(packet, o) for o in packet.overloads() if "out" not in o]
    return [o for o in found if seams.has_kernel(_full_name(o))]


def _full_name(op: Any) -> str:
    name, overload = seams.schema(op).name, seams.overload_name(op)
    return name if overload == "default" else f"{name}.{overload}"


@contextmanager
def active(white: Collection[str], black: Collection[str], half: torch.dtype) -> Iterator[None]:
    """Run white operations in `half` and black ones in float32 wherever autocast is enabled."""
    _active.append(dict.fromkeys(black, torch.float32) | dict.fromkeys(white, half))
    try:
        yield
    finally:
        _active.pop()


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Cast the float32, float16 and bfloat16 tensors in a nested structure. Leave everything else unchanged."""
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    return seams.pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype in kinds else t, value)


def _override(op: Any, name: str, key: str) -> None:
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
    full = _full_name(op)
    before: Callable[..., Any] | None = None
    if seams.has_kernel_for(full, key):
        before = torch.library.get_kernel(full, key).call_boxed
    below = seams.DispatchKeySet(getattr(seams.DispatchKey, key))

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = _active[-1].get(name) if _active else None
        if dtype is not None:
            args, kwargs = to_dtype((args, kwargs), dtype)
        elif before is not None:
            return before(keys, *args, **kwargs)
        with seams.ExcludeDispatchKeyGuard(below):
            return op(*args, **kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # the override is intended
        _library.impl(full, kernel, key, with_keyset=True, allow_override=True)
