"""Which kernels compute which tensors, and how shards find the norms of their whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fleetx.optim import foreach, native, stock

Reduce = Callable[[Tensor], None]


@dataclass(frozen=True)
class Path:
    """Tensors that are computed together. `tensors`: parameters, gradients and each kind of state, in lists."""

    kernels: ModuleType
    tensors: list[list[Tensor]]
    where: list[int]  # their positions in what `paths` was given
    reduce: Reduce | None  # sums squared norms in place over the ranks that hold the other shards

    def pick(self, values: list[Any]) -> list[Any]:
        return values if len(values) == len(self.where) else [values[i] for i in self.where]


def paths(*lists: list[Tensor]) -> Iterator[Path]:
    """`lists`: parameters, gradients, then states."""
    fast = _fast()
    found: dict[Any, list[int]] = {}
    for i, tensors in enumerate(zip(*lists, strict=True)):
        found.setdefault(_PLAIN if _plain(tensors) else _kind(tensors), []).append(i)
    for (flat, _, _, mesh, placements), where in found.items():
        if len(found) == 1 and mesh is None:
            yield Path(fast if flat else foreach, list(lists), where, None)
            return
        chosen = [[values[i] for i in where] for values in lists]
        reduce = None
        if mesh is not None:
            chosen = [[_local(t, placements) for t in values] for values in chosen]
            chosen = _alike(chosen) if flat else chosen
            reduce = _reducer(mesh, placements)
        yield Path(fast if flat else foreach, chosen, where, reduce)


def _fast() -> ModuleType:
    return native if native.available() else stock


_FP32 = torch.float32
_PLAIN = (True, torch.device("cpu"), _FP32, None, None)  # the `_kind` of what is plain


def _plain(tensors: tuple[Tensor, ...]) -> bool:
    """The common case, found with as few calls as can be: this is asked for every parameter in every step."""
    n = tensors[0].numel()
    for t in tensors:
        if (type(t) is not Tensor and type(t) is not Parameter) or t.dtype is not _FP32 or not t.is_contiguous():
            return False
        if not t.is_cpu or t.numel() != n or t.is_neg() or t._is_zerotensor():
            return False
    return True


def _kind(tensors: tuple[Tensor, ...]) -> tuple[bool, torch.device, torch.dtype, Any, Any]:
    """What must be alike for tensors to be computed together."""
    p: Any = tensors[0]
    simple = p.dtype is torch.float32 and p.device.type == "cpu" and not hasattr(p, "fake_mode")  # which has no memory
    if hasattr(p, "device_mesh"):
        # The ranks of a mesh must choose alike, or they would wait for each other in different places: nothing that
        # only this rank knows, such as the layout of its shard, may matter here.
        return simple, p.device, p.dtype, p.device_mesh, p.placements
    return simple and _same_memory(tensors), p.device, p.dtype, None, None


def _same_memory(tensors: tuple[Tensor, ...]) -> bool:
    """Is each of them one dense piece of memory, with the elements in the same order? Then they can be read flat."""
    p = tensors[0]
    if any(t.dtype is not p.dtype or t.device != p.device or t.shape != p.shape for t in tensors[1:]):
        return False
    if not all(_ordinary(t) for t in tensors):
        return False
    strides = p.stride()
    return all(t.stride() == strides for t in tensors) and _dense(p)


def _ordinary(t: Tensor) -> bool:
    """Is what lies at its address its value? Not so in a subclass, in a lazy negation, in a zero without memory."""
    return type(t) in (Tensor, Parameter) and not t.is_neg() and not t._is_zerotensor()


def _dense(t: Tensor) -> bool:
    expected = 1
    for stride, size in sorted((st, n) for st, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


# --- shards -----------------------------------------------------------------------------------------
def _local(t: Any, placements: Any) -> Tensor:
    if t.placements != placements:
        t = t.redistribute(placements=placements)
    return t.to_local()


def _alike(chosen: list[list[Tensor]]) -> list[list[Tensor]]:
    """Local shards as the flat kernels want them. FSDP's always are; a gradient in another order is copied."""
    params, grads, *states = chosen
    for t in (t for values in (params, *states) for t in values):
        if not t.is_contiguous():
            raise RuntimeError(f"a shard of the shape {tuple(t.shape)} is not contiguous")
    for some in zip(*chosen, strict=True):
        if any(t.shape != some[0].shape for t in some):
            raise RuntimeError(f"the shards of a parameter do not fit together: {[tuple(t.shape) for t in some]}")
    return [params, [g.contiguous() for g in grads], *states]


def _reducer(mesh: Any, placements: Any) -> Reduce | None:
    if any(p.is_partial() for p in placements):
        raise RuntimeError("a parameter that is Partial over a mesh has no norm of its own")
    split = [mesh.get_group(dim) for dim, p in enumerate(placements) if not p.is_replicate()]

    def reduce(squares: Tensor) -> None:
        for group in split:
            dist.all_reduce(squares, group=group)

    return reduce if split else None
