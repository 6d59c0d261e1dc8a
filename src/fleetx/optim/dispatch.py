"""Which kernels compute which tensors, and how shards get the norms of their whole tensors.

Triton kernels are checked on the device that they will run on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fleetx.base import seams
from fleetx.base.trees import is_dense
from fleetx.base.triton_kernels import TritonKernels
from fleetx.optim import foreach, native
from fleetx.optim.foreach import AllSum, is_plain


@dataclass(frozen=True)
class KernelCall:
    """Kernels, and the tensors that one call to them updates."""

    kernels: ModuleType
    tensors: list[list[Tensor]]  # parameters, gradients and each kind of state
    positions: list[int]  # in the lists passed to `kernel_calls`
    reduce: AllSum | None  # sums squared norms in place over the ranks that hold the other shards

    def pick(self, values: list[Any]) -> list[Any]:
        """The values that belong to these tensors."""
        return values if len(values) == len(self.positions) else [values[i] for i in self.positions]


def kernel_calls(*lists: list[Tensor]) -> Iterator[KernelCall]:
    """Group the tensors by the kernels that take them. `lists`: parameters, gradients, then states."""
    groups: dict[Any, list[int]] = {}
    for i, tensors in enumerate(zip(*lists, strict=True)):
        groups.setdefault(_PLAIN if is_plain(tensors) else _kind(tensors), []).append(i)
    for (flat, device, _, mesh, placements), positions in groups.items():
        chosen = list(lists) if len(groups) == 1 else [[values[i] for i in positions] for values in lists]
        reduce = None
        if mesh is not None:
            chosen = [[local(t, placements) for t in values] for values in chosen]
            flat = flat and not hasattr(chosen[0][0], "fake_mode")  # a fake tensor has no memory
            reduce = _reducer(mesh, placements)
        kernels = flat_kernels(device) if flat else foreach
        flat = flat and (kernels is not foreach or device.type == "cpu")
        if flat and mesh is not None:
            chosen = _contiguous(chosen)
        if flat and kernels is foreach:
            chosen = [[t.as_strided((t.numel(),), (1,)) for t in values] for values in chosen]
        yield KernelCall(kernels, chosen, positions, reduce)


def flat_kernels(device: torch.device) -> ModuleType:
    """The fastest kernels for flat arrays of fp32 on this device."""
    if gpu.available(device):
        return gpu.loaded()
    return native if device.type == "cpu" and native.available() else foreach


def kernels_remark(device: torch.device) -> str:
    """Which kernels run on this device, and why not faster ones, for `explain`."""
    kernels = flat_kernels(device)
    if kernels is not foreach:
        return f"kernels on {device}: {'compiled' if kernels is native else 'Triton'}"
    reason = native.reason() if device.type == "cpu" else gpu.reason(device)
    return f"kernels on {device}: torch's foreach functions ({reason})"


_PLAIN = (True, torch.device("cpu"), torch.float32, None, None)  # the `_kind` of plain tensors


def _kind(tensors: tuple[Tensor, ...]) -> tuple[bool, torch.device, torch.dtype, Any, Any]:
    """What tensors of one call have in common; first, whether they can be read as flat arrays of fp32."""
    p: Any = tensors[0]
    simple = p.dtype is torch.float32 and p.device.type in ("cpu", "cuda") and not hasattr(p, "fake_mode")
    if hasattr(p, "device_mesh"):
        # All ranks of a mesh must make the same choice or they would deadlock, so the result must not depend on
        # anything that only this rank knows, such as the layout of its shard.
        return simple, p.device, p.dtype, p.device_mesh, p.placements
    return simple and _same_layout(tensors), p.device, p.dtype, None, None


def _same_layout(tensors: tuple[Tensor, ...]) -> bool:
    """Whether all are dense and keep their elements in the same order in memory."""
    p = tensors[0]
    return is_dense(p.shape, p.stride()) and all(
        type(t) in (Tensor, Parameter)  # memory is not the value in a subclass, a lazy negation or a zero tensor
        and not t.is_neg()
        and not seams.is_zerotensor(t)
        and (t.dtype, t.device, t.shape, t.stride()) == (p.dtype, p.device, p.shape, p.stride())
        for t in tensors
    )


# --- shards -----------------------------------------------------------------------------------------
def local(t: Any, placements: Any = None) -> Tensor:
    """The shard of a tensor that this rank holds, after redistributing it to these placements if they differ."""
    if not hasattr(t, "device_mesh"):
        return t
    if placements is not None and t.placements != placements:
        t = t.redistribute(placements=placements)
    return t.to_local()


def _contiguous(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    """Check local shards for the flat kernels. Those of FSDP2 always pass; a gradient in another layout is copied."""
    params, grads, *states = lists
    for t in (t for values in (params, *states) for t in values):
        if not t.is_contiguous():
            raise RuntimeError(f"a shard of shape {tuple(t.shape)} is not contiguous")
    for tensors in zip(*lists, strict=True):
        if any(t.shape != tensors[0].shape for t in tensors):
            shapes = [tuple(t.shape) for t in tensors]
            raise RuntimeError(f"the shards of a parameter, its gradient and its state differ in shape: {shapes}")
    return [params, [g.contiguous() for g in grads], *states]


def _reducer(mesh: Any, placements: Any) -> AllSum | None:
    if any(p.is_partial() for p in placements):
        raise RuntimeError("a parameter is Partial over its mesh, so its norm is not defined")
    groups = [mesh.get_group(dim) for dim, p in enumerate(placements) if not p.is_replicate()]

    def reduce(squares: Tensor) -> None:
        for group in groups:
            dist.all_reduce(squares, group=group)

    return reduce if groups else None


# --- Triton -----------------------------------------------------------------------------------------
@torch.no_grad()
def _check(kernels: ModuleType, device: torch.device) -> str:
    """Compare with the foreach functions once, at run time, because CI has no GPU."""
    sizes, decays = (1, 1000, kernels.CHUNK + 77), [0.01, 0.0, 0.3]
    for name, kinds, step in (
        ("lars", 3, foreach.LarsStep(0.1, 0.02, decays, 1e-9, 0.9, nesterov=False, maximize=False)),
        ("lamb", 4, foreach.LambStep(0.01, 0.9, 0.99, 1e-6, decays, [True, False, True], [1, 2, 30], maximize=False)),
    ):
        found, expected = _tensors(sizes, kinds, device), _tensors(sizes, kinds, device)
        getattr(kernels, name)(*found, step)
        getattr(foreach, name)(*expected, step)
        joined = [torch.cat([t for tensors in lists for t in tensors]) for lists in (found, expected)]
        error = (joined[0] - joined[1]).abs().max().item()
        if not error <= 1e-4:
            return f"the Triton kernel of {name} differs from torch by {error:g} on {device}: please report this"
    return ""


def _tensors(sizes: tuple[int, ...], kinds: int, device: torch.device) -> list[list[Tensor]]:
    source = torch.Generator().manual_seed(0)
    return [[torch.rand(n, generator=source).to(device) for n in sizes] for _ in range(kinds)]


gpu = TritonKernels("fleetx.optim.triton_kernels", _check)
