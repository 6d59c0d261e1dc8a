"""Which modules FSDP gathers as one, and how it divides them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from fleetx.base.module_names import has_forward, matches, named, named_modules, plain_name
from fleetx.comm.world import World

_SMALL = 1 / 8  # of a segment: what is smaller is gathered with the rest of the model


def incompatibilities(model: nn.Module, anchors: Iterable[str]) -> Iterator[str]:
    modules = dict(named_modules(model))
    for pattern in anchors:
        found = matches(pattern, modules)
        if not found:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.4)
            hint = f": did you mean {', '.join(near)}?" if near else ""
            yield f"sharding_configs['segment_anchors']: the model has no module {pattern!r}{hint}"
        elif bare := [n for n in found if not has_forward(modules[n])]:
            yield f"sharding_configs['segment_anchors']: {bare[0]!r} has no forward of its own: write '{bare[0]}.*'"
        elif shared := [t for t in _tied(model) if any(t.startswith(f"{n}.") for n in found)]:
            yield f"sharding_configs['segment_anchors']: {shared[0]!r} is tied to another: it belongs to no segment"


def segments(model: nn.Module, anchors: Sequence[str], size: int) -> list[str]:
    """The names of the modules that are gathered as one. What is in none of them is gathered with the model itself."""
    if anchors:
        return named(model, anchors)
    tied = _tied(model)
    return [name for name in _by_size(model, "", size) if not any(t.startswith(f"{name}.") for t in tied)]


def largest(model: nn.Module, size: int) -> int:
    """Bytes of the largest of them, the model itself included."""
    modules = dict(named_modules(model))
    names = segments(model, [], size)
    found = [sum(p.nbytes for p in modules[name].parameters()) for name in names]
    return max((*found, sum(p.nbytes for p in model.parameters()) - sum(found)))


def _tied(model: nn.Module) -> list[str]:
    """The names of parameters that have several. FSDP would divide each of them apart."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(plain_name(name))
    return [name for some in names.values() if len(some) > 1 for name in some]


def _by_size(module: nn.Module, name: str, size: int) -> Iterator[str]:
    for key, child in module.named_children():
        inner = plain_name(f"{name}.{key}" if name else key)
        bytes_ = sum(p.nbytes for p in child.parameters())
        whole = has_forward(child) and (bytes_ <= size or not any(True for _ in child.children()))
        if whole and bytes_ >= size * _SMALL:
            yield inner
        elif not whole:
            yield from _by_size(child, inner, size)


def divide(model: nn.Module, names: Sequence[str], world: World, degree: int, *, again: bool, offload: bool) -> World:
    """Shard the model in place, over neighbouring ranks; returns those that hold one copy together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    world.broadcast([t.detach() for t in (*model.parameters(), *model.buffers())])  # each rank made its own
    kind = world.device.type
    if degree == world.size:
        mesh = init_device_mesh(kind, (degree,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(kind, (world.size // degree, degree), mesh_dim_names=("replica", "shard"))
    policy: Any = CPUOffloadPolicy() if offload else OffloadPolicy()
    modules = dict(named_modules(model))
    for name in names:
        fully_shard(modules[name], mesh=mesh, reshard_after_forward=again, offload_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=again, offload_policy=policy)
    return world.split([list(range(first, first + degree)) for first in range(0, world.size, degree)])
