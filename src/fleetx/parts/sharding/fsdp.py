"""Which modules FSDP2 gathers as one segment, and the calls to `fully_shard`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.base.module_names import has_forward, matches, named, named_modules, no_module, plain_name, sparse_problem
from fleetx.comm.world import World
from fleetx.engine.context import SetupContext
from fleetx.engine.dtensors import HOOKED
from fleetx.errors import NOT_BUILT, StrategyError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fleetx.parts.sharding import Sharding
    from fleetx.parts.sharding.segment import Segments

_READS_CHILDREN = (nn.MultiheadAttention,)  # use the parameters of their children without calling these
_NEEDS_WHOLE_TENSORS = (torch.optim.Adafactor, torch.optim.Rprop)
_SMALL = 1 / 8  # of the segment size: smaller modules are gathered with the rest of the model


def incompatibilities(model: nn.Module, optimizer: Optimizer, anchors: Iterable[str]) -> Iterator[str]:
    modules = dict(named_modules(model))
    for pattern in anchors:
        names = matches(pattern, modules)
        where = "sharding_configs['segment_anchors']"
        if not names:
            yield f"{where}: {no_module(pattern, modules, otherwise='remove it')}"
        elif bare := [n for n in names if not has_forward(modules[n])]:
            yield f"{where}: {bare[0]!r} has no forward: use '{bare[0]}.*'"
        elif tied := [t for t in _tied(model) if any(t.startswith(f"{n}.") for n in names)]:
            yield f"{where}: {tied[0]!r} is tied to another parameter, so it cannot be in a segment: remove {pattern!r}"
    for name, p in model.named_parameters():
        if p.is_complex():
            yield f"sharding of the complex parameter {plain_name(name)!r} {NOT_BUILT} in torch: turn sharding off"
        if p.dim() == 0:
            yield f"sharding cannot divide the scalar parameter {plain_name(name)!r}: give it the shape (1,)"
        if not p.numel() and p.requires_grad:
            yield (
                f"sharding of the empty parameter {plain_name(name)!r} of shape {tuple(p.shape)} {NOT_BUILT} in torch: "
                "remove it, or set requires_grad=False"
            )
        if seams.hooks(p):
            yield HOOKED.format(f"parameter {plain_name(name)!r}")
    yield from sparse_problem("sharding", model)
    name = type(optimizer).__name__
    if isinstance(optimizer, _NEEDS_WHOLE_TENSORS):
        yield f"{name} on shards {NOT_BUILT} in torch: use another optimizer, such as AdamW, or turn sharding off"
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        yield f"{name}(fused=True) on shards {NOT_BUILT} in torch: remove fused=True, or turn sharding off"


def segments(model: nn.Module, anchors: Sequence[str], size: int) -> list[str]:
    """Names of the modules that are segments. All other parameters are gathered with the root."""
    if anchors:
        return named(model, anchors)
    tied = _tied(model)
    return [name for name in _by_size(model, "", size) if not any(t.startswith(f"{name}.") for t in tied)]


def check_dtypes(model: nn.Module, names: Sequence[str]) -> None:
    """Raise an error if torch cannot gather one of these segments, or the rest of the model, in one piece."""
    modules, seen = dict(named_modules(model)), set[nn.Parameter]()
    for module in (*(modules[name] for name in names), model):
        by_dtype: dict[torch.dtype, nn.Parameter] = {}
        for p in module.parameters():
            if p.requires_grad and p not in seen:
                by_dtype.setdefault(p.dtype, p)
        seen.update(module.parameters())
        if len(by_dtype) > 1:
            called = {p: plain_name(name) for name, p in model.named_parameters()}
            a, b = list(by_dtype.values())[:2]
            raise StrategyError(
                f"sharding: {called[a]!r} is {a.dtype} and {called[b]!r} is {b.dtype}, but torch gathers them "
                "together and needs one dtype for that: convert one of them, freeze it, or list the modules of one "
                "dtype in sharding_configs['segment_anchors'], which are gathered on their own"
            )


def largest(model: nn.Module, size: int) -> int:
    """Bytes of the largest segment, including the root."""
    modules = dict(named_modules(model))
    sizes = [_bytes(modules[name]) for name in segments(model, [], size)]
    return max((*sizes, _bytes(model) - sum(sizes)))


def _bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def _tied(model: nn.Module) -> list[str]:
    """All names of parameters with several names. FSDP would shard them separately."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(plain_name(name))
    return [name for some in names.values() if len(some) > 1 for name in some]


def _by_size(module: nn.Module, name: str, size: int) -> Iterator[str]:
    for key, child in module.named_children():
        inner = plain_name(f"{name}.{key}" if name else key)
        whole = isinstance(child, _READS_CHILDREN) or not any(True for _ in child.children())
        fits = has_forward(child) and (_bytes(child) <= size or whole)
        if not fits:
            yield from _by_size(child, inner, size)
        elif _bytes(child) >= size * _SMALL:
            yield inner


_meshes: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], DeviceMesh]] = weakref.WeakKeyDictionary()


def _mesh(world: World, degree: int) -> DeviceMesh:
    """The mesh of the ranks that together hold one copy of the model.

    Made once per process group: each group of a mesh costs threads, and a mesh cannot be destroyed with its model,
    because torch caches results of DTensor operators for every equal mesh.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    kind = world.device.type
    if degree == world.size:  # needs no group of its own
        return init_device_mesh(kind, (degree,), mesh_dim_names=("shard",))
    made = _meshes.setdefault(dist.group.WORLD, {})
    if (kind, degree) not in made:
        grid = init_device_mesh(kind, (world.size // degree, degree), mesh_dim_names=("replica", "shard"))
        made[kind, degree] = grid["shard"]
    return made[kind, degree]


def shard(part: Sharding, model: nn.Module, names: Sequence[str], ctx: SetupContext) -> tuple[World, Segments]:
    """Shard the model in place across consecutive ranks. Returns the ranks that together hold one copy, and segments.

    If there are several such groups, torch only knows this rank's: fleetx reduces between them, as the strategy says.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    from fleetx.parts.sharding.segment import Segments  # torch's FSDP takes a second to import
    from fleetx.parts.sharding.unshard import Unsharded, allow_copies

    check_dtypes(model, names)
    world, plain = ctx.world, Unsharded(model)
    for p in model.parameters():
        p.data = p.data.contiguous()  # FSDP does not divide other layouts, such as channels_last
    world.broadcast([t.detach() for t in (*model.parameters(), *model.buffers())])  # each rank has initialized its own
    degree, offload = part.shards(world), part.offload and world.device.type != "cpu"
    options: Any = {
        "mesh": _mesh(world, degree),
        "reshard_after_forward": part.stage == 3,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    modules = dict(named_modules(model))
    for module in (*(modules[name] for name in names), model):  # the root last
        fully_shard(module, **options)
    group = world.split([list(range(first, first + degree)) for first in range(0, world.size, degree)])
    allow_copies(model)
    ctx.on_release(lambda: plain.restore(ctx.optimizer))
    alike = group if ctx.apart else world  # ranks that must use the same parameters
    between = ctx if degree < world.size else None
    return group, Segments(model, alike, finds_unused=ctx.finds_unused, ctx=between, degree=degree)
