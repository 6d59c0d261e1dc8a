"""Nested containers as JSON, with their tensors stored separately: what pickle would do, for plain data only.

tensor   {"$tensor": name, "$stride": [...] if it is not contiguous}
tuple    {"$tuple": [...]}
dict     an object; {"$dict": [[key, value] ...]} if a key is not a string or starts with "$"
nan ...  {"$float": "nan"}
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetx.base.trees import is_dense
from fleetx.errors import UsageError

_DEEP = 100  # levels of plain data; in JSON, there may be twice as many
_BITS = 4096  # of an integer; Python does not read more than about 14,000


def encode(value: Any, tensors: dict[str, Tensor], where: str, depth: int = 0) -> Any:
    """Plain data for JSON; the tensors in it are added to `tensors`. where: for error messages."""
    if depth > _DEEP:
        raise UsageError(f"{where[:40]} ... is nested more than {_DEEP} levels deep, which a checkpoint cannot hold")
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is int and value.bit_length() > _BITS:
        raise UsageError(f"{where} is a number of {value.bit_length()} bits, which a checkpoint cannot hold")
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor):
        return _tensor(value, tensors)
    if isinstance(value, list | tuple):
        items = [encode(v, tensors, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        pairs = [
            [encode(k, tensors, where, depth + 1), encode(v, tensors, f"{where}[{k!r}]", depth + 1)]
            for k, v in value.items()
        ]
        if isinstance(value, Counter):
            return {"$counter": pairs}
        plain = all(isinstance(k, str) and not k.startswith("$") for k in value)
        return dict(pairs) if plain else {"$dict": pairs}
    raise UsageError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: only tensors, numbers, strings, lists, "
        "tuples and dicts can be saved"
    )


def _tensor(t: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    t = t.detach()
    out: dict[str, Any] = {"$tensor": f"state.{len(tensors)}"}
    if t.is_complex():
        t, out["$complex"] = torch.view_as_real(t), True
    elif not t.is_contiguous() and torch.empty_like(t, device="meta").stride() == t.stride():
        out["$stride"] = list(t.stride())
    tensors[out["$tensor"]] = t
    return out


def decode(value: Any, read: Callable[[str], Tensor], depth: int = 0) -> Any:
    """The inverse of `encode`. Raises ValueError if `encode` did not write this value.

    read: returns a tensor by name; it is not copied.
    """
    if depth > 3 * _DEEP:
        raise ValueError("it is nested too deeply")
    if isinstance(value, list):
        return [decode(v, read, depth + 1) for v in value]
    if not isinstance(value, dict):
        return value
    tag = next((k for k in value if k.startswith("$")), None)
    if tag is None:
        return {k: decode(v, read, depth + 1) for k, v in value.items()}
    inside = value[tag]
    if tag == "$float" and inside in ("nan", "inf", "-inf"):
        return float(inside)
    if tag == "$tensor" and isinstance(inside, str) and value.keys() <= {"$tensor", "$stride", "$complex"}:
        return _as_saved(read(inside), value)
    if tag in ("$tuple", "$dict", "$counter") and isinstance(inside, list) and len(value) == 1:
        items = [decode(v, read, depth + 1) for v in inside]
        if tag == "$tuple":
            return tuple(items)
        pairs = dict(items)
        return Counter(pairs) if tag == "$counter" else pairs
    raise ValueError(f"{tag} has no meaning here")


def _as_saved(t: Tensor, value: dict[str, Any]) -> Tensor:
    if value.get("$complex"):
        return torch.view_as_complex(t.clone())
    stride = value.get("$stride")
    if stride is None:
        return t
    steps = isinstance(stride, list) and len(stride) == t.dim() and all(type(s) is int and s > 0 for s in stride)
    if not steps or not (is_dense(t.shape, stride) or 0 in t.shape):
        raise ValueError(f"{stride} are not the strides of a tensor of {list(t.shape)}")
    return torch.empty_strided(tuple(t.shape), tuple(stride), dtype=t.dtype).copy_(t)
