"""Undo `fully_shard`: plain modules, full parameters and full optimizer state.

Also handles copies: `copy.deepcopy` of a sharded model gives another one; pickling or converting it raises an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.engine.dtensors import local
from fleetx.engine.guests import BEFORE
from fleetx.errors import UsageError
from fleetx.parts.sharding.segment import Segments

_FSDP = "torch.distributed.fsdp"
_NAMES = ("__deepcopy__", "__reduce_ex__", "_apply")  # looked up on the instance; FSDP's class raises for the first
_INSIDE = "fleetx: a module that contains this one is being copied"


class Unsharded:
    """The model before `fully_shard`, which changes classes, attributes and hooks of modules and cannot be undone."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._before = {module: (type(module), set(vars(module))) for module in model.modules()}

    def restore(self, optimizer: Optimizer) -> None:
        """Give every rank the full model. A collective."""
        forbid_copies(self._model)
        module: Any
        for module in self._model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        full: dict[Any, nn.Parameter] = {}
        for module in self._model.modules():
            for name, p in seams.parameters(module).items():
                if p is not None and p not in full:
                    full[p] = _full_parameter(p)
                seams.parameters(module)[name] = None if p is None else full[p]
        for group in optimizer.param_groups:
            group["params"] = [full.get(p, p) for p in group["params"]]
        for old in list(optimizer.state):
            state = optimizer.state.pop(old)
            new: Tensor = full.get(old, old)
            optimizer.state[new] = {k: _full(v) if isinstance(v, Tensor) else v for k, v in state.items()}
        for module, (kind, attributes) in self._before.items():
            module.__class__ = kind
            seams.states.pop(module, None)
            for name in set(vars(module)) - attributes:
                if _is_of_fsdp(name):
                    del vars(module)[name]
            _remove_hooks(module)


def _is_of_fsdp(attribute: str) -> bool:
    return "fsdp" in attribute or "composable_api" in attribute


def _remove_hooks(module: nn.Module) -> None:
    for name, table in _without_hooks_of_fsdp(vars(module)).items():
        if _is_table(name, table):
            for key in set(vars(module)[name]) - set(table):
                del vars(module)[name][key]


def _without_hooks_of_fsdp(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module, with new tables of hooks that leave out those of FSDP."""
    tables = [table for name, table in attributes.items() if _is_table(name, table)]
    ours = {key for table in tables for key, hook in table.items() if _origin(hook).startswith(_FSDP)}
    return {
        name: type(value)((k, v) for k, v in value.items() if k not in ours) if _is_table(name, value) else value
        for name, value in attributes.items()
    }


def _is_table(name: Any, value: Any) -> bool:
    return "hooks" in str(name) and isinstance(value, dict)


def _origin(hook: Any) -> str:
    return str(getattr(getattr(hook, "hook", hook), "__module__", ""))


def _full_parameter(p: nn.Parameter) -> nn.Parameter:
    full = nn.Parameter(_full(p.detach()), requires_grad=p.requires_grad)
    if p.grad is not None:
        full.grad = _full(p.grad)
    return full


def _full(t: Any) -> Tensor:
    full: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return full


# --- copies ---------------------------------------------------------------------------------------
def allow_copies(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            own = partial(_copied, module), _not_pickled, partial(_converted, module)
            vars(module).update(zip(_NAMES, own, strict=True))


def forbid_copies(model: nn.Module) -> None:
    for module in model.modules():
        for name in _NAMES:
            vars(module).pop(name, None)


def _copied(module: Any, memo: dict[Any, Any]) -> nn.Module:
    """A sharded copy, such as for a moving average of weights. Every rank must make it.

    If `memo` already has a replacement for every parameter, the copy is plain: there is nothing to gather.
    """
    if _INSIDE in memo or all(id(p) in memo for p in module.parameters()):
        return _plain(module, memo)
    memo[_INSIDE] = True
    made = _plain(module, memo)
    del memo[_INSIDE]
    states = [seams.fsdp_state(m) for m in module.modules() if isinstance(m, FSDPModule)]
    group: Any = next(group for state in states for group in seams.param_groups(state))
    for part in made.modules():
        _remove_hooks(part)
    pairs = zip(module.modules(), made.modules(), strict=True)
    for new in reversed([new for old, new in pairs if isinstance(old, FSDPModule)]):  # the root last
        fully_shard(new, mesh=group.mesh_info.mesh, reshard_after_forward=True, offload_policy=group.offload_policy)
    Segments(made)
    allow_copies(made)
    return made


def _plain(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """The module before `fully_shard`, with full parameters."""
    kind: Any = type(module).__bases__[1]
    made: nn.Module = kind.__new__(kind)
    memo[id(module)] = made
    for p in module.parameters():
        if id(p) not in memo:
            memo[id(p)] = _full_parameter(p)
    attributes = {k: v for k, v in vars(module).items() if not _is_of_fsdp(k) and k not in _NAMES}
    vars(made).update(copy.deepcopy(_without_hooks_of_fsdp(attributes), memo))
    return made


def _not_pickled(protocol: Any) -> Any:
    raise UsageError(
        "torch.save or pickle of a sharded model would write only the shards of this rank: use fleet.save(folder) on "
        "every rank, or save fleet.release(model)"
    )


def _converted(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`module.to(...)` calls this. Trainers call that with the device and dtype that the model already has."""
    held = [local(t) for t in (*module.parameters(), *module.buffers())]
    if any(_kind(convert(t)) != _kind(t) for t in held):
        raise UsageError(f"a sharded model cannot be moved or converted: {BEFORE}")
    return module


def _kind(t: Tensor) -> tuple[object, ...]:
    return t.dtype, t.device.type, t.device.index or 0  # "cpu:0", as accelerate says, is "cpu"
