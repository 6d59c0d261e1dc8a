"""Undo `fully_shard`: plain modules, full parameters and full optimizer state."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base import seams

_FSDP = "torch.distributed.fsdp"


class Unsharded:
    """The model before `fully_shard`, which changes classes, attributes and hooks of modules. torch cannot undo it."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._before = {module: (type(module), set(vars(module))) for module in model.modules()}

    def restore(self, optimizer: Optimizer) -> None:
        """Give every rank the full model. A collective."""
        from fleetx.parts.sharding import copies  # torch's FSDP takes a second to import

        copies.forbid(self._model)
        module: Any
        for module in self._model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        full: dict[Any, nn.Parameter] = {}
        for module in self._model.modules():
            for name, p in seams.parameters(module).items():
                if p is not None and p not in full:
                    full[p] = full_parameter(p)
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
                if is_of_fsdp(name):
                    del vars(module)[name]
            remove_hooks(module)


def is_of_fsdp(attribute: str) -> bool:
    return "fsdp" in attribute or "composable_api" in attribute


def remove_hooks(module: nn.Module) -> None:
    for name, table in without_hooks_of_fsdp(vars(module)).items():
        if _is_table(name, table):
            for key in set(vars(module)[name]) - set(table):
                del vars(module)[name][key]


def without_hooks_of_fsdp(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module; tables of hooks are new ones."""
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


def full_parameter(p: nn.Parameter) -> nn.Parameter:
    full = nn.Parameter(_full(p.detach()), requires_grad=p.requires_grad)
    if p.grad is not None:
        full.grad = _full(p.grad)
    return full


def _full(t: Any) -> Tensor:
    full: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return full
