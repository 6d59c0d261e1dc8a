"""`fleet.metrics` and `fleet.all_reduce`: reduce numbers over all ranks to one result that every rank gets.

All leaves of a call travel together in one gather, as int64 or as the bits of float64. Each rank then reduces them in
rank order, so integers are exact, and floats are rounded in the same way on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetx.base.suggest import did_you_mean
from fleetx.comm import peers
from fleetx.comm.session import current
from fleetx.comm.world import World
from fleetx.errors import UsageError

_AT_ONCE = 2**23  # numbers in one gather, counted over all ranks
_MODES = ("sum", "max", "min")


class Metrics:
    """`fleet.metrics()` returns the facts of a recorded run. Its methods reduce numbers over ranks.

    Every rank must call these methods, with values of the same form.
    A value is a number, a tensor or an array, or a dict, list or tuple of them; the result has the same form. In
    `mean` and `sum` each replica of the model counts once, because the stages of a pipeline see the same batches.
    """

    def __call__(self) -> dict[str, Any]:
        """The facts of the last round whose numbers are known, such as `loss`, `rate`, `seconds` and `time`.

        Needs `fleet.record` or `fleet.progress`. docs/recording.md lists the keys.
        """
        recorder = current().recorder
        if recorder is None:
            raise UsageError("nothing is recorded: call fleet.record(folder) first, or use fleet.progress(loader)")
        return recorder.metrics()

    def mean(self, value: Any, *, model: nn.Module | None = None) -> Any:
        """The mean over the replicas. The mean of integers is a float, or a tensor of float64."""
        return _reduced("mean", value, model)

    def sum(self, value: Any, *, model: nn.Module | None = None) -> Any:
        """The sum over the replicas. The sum of integers or booleans is an int, or a tensor of int64."""
        return _reduced("sum", value, model)

    def max(self, value: Any) -> Any:
        """The largest value of any rank, element by element; nan if any is nan."""
        return _reduced("max", value, None)

    def min(self, value: Any) -> Any:
        """The smallest value of any rank, element by element; nan if any is nan."""
        return _reduced("min", value, None)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, as a list in rank order."""
        return _reduced("gather", value, None)


metrics = Metrics()


def all_reduce(value: Any, mode: str = "sum") -> Any:
    """Paddle's `fleet.util.all_reduce`: "sum", "max" or "min" of a value over the ranks. Every rank must call it."""
    if mode not in _MODES:
        raise UsageError(f"mode={mode!r}: {did_you_mean(mode, _MODES, otherwise='it must be sum, max or min')}")
    return getattr(metrics, mode)(value)


# --- the values of one call -----------------------------------------------------------------------
class _Leaf:
    """A number or tensor of a call."""

    def __init__(self, value: Any, path: str, device: torch.device):
        found = _tensor(value, path)
        self.value, self.path, self.shape = value, path, tuple(found.shape)
        self.is_int = not found.is_floating_point()
        self.described = f"{str(found.dtype).removeprefix('torch.')}{self.shape}"
        flat = found.reshape(-1).to(device)
        self.bits = flat.long() if self.is_int else flat.double().view(torch.int64)

    def result(self, how: str, bits: Tensor, count: int) -> Any:
        """The reduced numbers in the form of the value."""
        found = bits if self.is_int else bits.view(torch.float64)
        if not isinstance(self.value, Tensor | np.ndarray):
            number = found.item()
            if how == "mean":
                return number / count  # dividing two integers rounds only once
            return bool(number) if isinstance(self.value, bool | np.bool_) and how != "sum" else number
        if how == "mean":
            found = found.double() / count
        keep = not self.is_int or how not in ("sum", "mean")
        found = found.reshape(self.shape).clone()  # not a view of all leaves
        if isinstance(self.value, Tensor):
            return found.to(self.value.device, self.value.dtype if keep else found.dtype)
        array = found.cpu().numpy()
        return array.astype(self.value.dtype) if keep else array


def _tensor(value: Any, path: str) -> Tensor:
    if isinstance(value, np.ndarray | np.generic):
        value = torch.as_tensor(np.asarray(value))
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UsageError(f"{path}is {value}, which does not fit into 64 bits: pass a float")
    found = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=_KINDS.get(type(value)))
    if type(found) not in (Tensor, nn.Parameter) or found.is_complex() or found.dtype is torch.uint64:
        raise UsageError(
            f"{path}is a {type(found).__name__} of {found.dtype}: pass real numbers, and whole tensors, not shards"
        )
    return found


_KINDS = {float: torch.float64, int: torch.int64, bool: torch.bool}


def _map(value: Any, leaf: Callable[[Any, str], Any], path: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _map(v, leaf, f"{path}{key}: ") for key, v in value.items()}
    if isinstance(value, list | tuple):
        items = [_map(v, leaf, f"{path}{i}: ") for i, v in enumerate(value)]
        if hasattr(value, "_fields"):
            return type(value)(*items)  # a named tuple
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, Tensor | np.ndarray | np.generic | int | float):
        raise TypeError(
            f"{path}a {type(value).__name__} is not a number: pass numbers, tensors or arrays, or a dict, list or "
            "tuple of them"
        )
    return leaf(value, path)


def _reduced(how: str, value: Any, model: nn.Module | None) -> Any:
    world = current().here()
    leaves: list[_Leaf] = []
    _map(value, lambda v, path: leaves.append(_Leaf(v, path, world.device)))
    _meet(f"fleet.metrics.{how}", leaves)
    counted = _counted(world, model) if how in ("mean", "sum") else range(world.size)
    with peers.naming():
        rows = _rows(how, leaves, world, counted)
    every = [_rebuilt(how, value, leaves, row, len(counted)) for row in rows]
    return every if how == "gather" else every[0]


def _rebuilt(how: str, value: Any, leaves: list[_Leaf], row: Tensor, count: int) -> Any:
    parts = row.split([len(leaf.bits) for leaf in leaves])
    results = (leaf.result(how, bits, count) for leaf, bits in zip(leaves, parts, strict=True))
    return _map(value, lambda v, path: next(results))


def _meet(call: str, leaves: list[_Leaf]) -> None:
    """Meet under a name that describes the values: ranks with other values get an error, not mixed-up bytes."""
    text = ", ".join(f"{leaf.path}{leaf.described}" for leaf in leaves)
    if len(text) > 200:
        text = f"{text[:180]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
    peers.meet(f"{call}({text})", otherwise=f"every rank must call {call}")


def _counted(world: World, model: nn.Module | None) -> range:
    """The first rank of each replica."""
    engines = list(current().entries) if model is None else [current().find(model)]
    replicas = {engine.layout.replica_group.size for engine in engines}
    if len(replicas) > 1:
        raise UsageError("several models are distributed, over different numbers of replicas: pass model=...")
    return range(0, world.size, world.size // (replicas.pop() if replicas else world.size))


def _rows(how: str, leaves: list[_Leaf], world: World, counted: range) -> list[Tensor]:
    """The bits of the result; for a gather, one row per rank."""
    bits = torch.cat([leaf.bits for leaf in leaves]) if leaves else torch.empty(0, dtype=torch.int64)
    ints = torch.cat([torch.full_like(leaf.bits, leaf.is_int, dtype=torch.bool) for leaf in leaves] or [bits.bool()])
    width = max(1, _AT_ONCE // world.size)
    parts = []
    for first in range(0, len(bits), width):
        every = world.gather(bits[first : first + width])
        parts.append(every if how == "gather" else _one(how, every, ints[first : first + width], counted))
    if not parts:
        return [bits] * (world.size if how == "gather" else 1)
    whole = torch.cat(parts, dim=-1)
    return list(whole) if how == "gather" else [whole]


def _one(how: str, every: Tensor, ints: Tensor, counted: range) -> Tensor:
    out = torch.empty_like(every[0])
    for kind, mask in ((torch.int64, ints), (torch.float64, ~ints)):
        found = every[:, mask].view(kind)
        if how in ("max", "min"):
            out[mask] = (found.amax(0) if how == "max" else found.amin(0)).view(torch.int64)
            continue
        _check_replicas(every[:, mask], counted)
        found = found[list(counted)]
        if kind is torch.int64 and found.numel() and found.double().abs().sum(0).max() >= 2**63:
            raise UsageError("the sum of these integers does not fit into 64 bits: pass floats")
        out[mask] = found.sum(0).view(torch.int64)
    return out


def _check_replicas(every: Tensor, counted: range) -> None:
    """The ranks of one replica must have the same numbers, because only one of them counts."""
    shape = (len(counted), counted.step, every.shape[1])
    by_replica = every.reshape(shape)
    if not torch.equal(by_replica, by_replica[:, :1].expand(shape)):
        raise UsageError(
            "the ranks of one replica of the model have different numbers here, and only one of them can count: pass "
            "what all of them have, such as the loss that fleet.forward_backward returns, or call fleet.metrics.gather"
        )
