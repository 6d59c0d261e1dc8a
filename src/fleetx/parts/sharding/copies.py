"""Copies of a sharded model: `copy.deepcopy` gives another sharded model; pickling and conversions raise an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from fleetx.base import seams
from fleetx.engine.dtensors import local
from fleetx.engine.guests import BEFORE
from fleetx.errors import UsageError
from fleetx.parts.sharding.segment import Segments
from fleetx.parts.sharding.unshard import full_parameter, is_of_fsdp, remove_hooks, without_hooks_of_fsdp

_NAMES = ("__deepcopy__", "__reduce_ex__", "_apply")  # looked up on the instance; FSDP's class refuses the first
_INSIDE = "fleetx: a module that contains this one is being copied"


def allow(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            own = partial(_copied, module), _not_pickled, partial(_converted, module)
            vars(module).update(zip(_NAMES, own, strict=True))


def forbid(model: nn.Module) -> None:
    for module in model.modules():
        for name in _NAMES:
            vars(module).pop(name, None)


def _copied(module: Any, memo: dict[Any, Any]) -> nn.Module:
    """A sharded copy, such as for a moving average of weights. Every rank must make it.

    A plain one, if the caller has put something in the place of every parameter: there is nothing to gather.
    """
    if _INSIDE in memo or all(id(p) in memo for p in module.parameters()):
        return _plain(module, memo)
    memo[_INSIDE] = True
    made = _plain(module, memo)
    del memo[_INSIDE]
    states = [seams.fsdp_state(m) for m in module.modules() if isinstance(m, FSDPModule)]
    group: Any = next(group for state in states for group in seams.param_groups(state))
    for part in made.modules():
        remove_hooks(part)
    pairs = zip(module.modules(), made.modules(), strict=True)
    for new in reversed([new for old, new in pairs if isinstance(old, FSDPModule)]):  # the root last
        fully_shard(new, mesh=group.mesh_info.mesh, reshard_after_forward=True, offload_policy=group.offload_policy)
    Segments(made)
    allow(made)
    return made


def _plain(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """The module before `fully_shard`, with full parameters."""
    kind: Any = type(module).__bases__[1]
    made: nn.Module = kind.__new__(kind)
    memo[id(module)] = made
    for p in module.parameters():
        if id(p) not in memo:
            memo[id(p)] = full_parameter(p)
    attributes = {k: v for k, v in vars(module).items() if not is_of_fsdp(k) and k not in _NAMES}
    vars(made).update(copy.deepcopy(without_hooks_of_fsdp(attributes), memo))
    return made


def _not_pickled(protocol: Any) -> Any:
    raise UsageError(
        "torch.save or pickle of a sharded model would write only the shards of this rank: use fleet.save(folder) on "
        "every rank, or save fleet.release(model)"
    )


def _converted(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`module.to(...)`, which calls this. Trainers call it with the device and type that the model has already."""
    held = [local(t) for t in (*module.parameters(), *module.buffers())]
    if any(_kind(convert(t)) != _kind(t) for t in held):
        raise UsageError(f"a sharded model cannot be moved or converted: {BEFORE}")
    return module


def _kind(t: Tensor) -> tuple[object, ...]:
    return t.dtype, t.device.type, t.device.index or 0  # "cpu:0", as accelerate says, is "cpu"
