"""Undo `fully_shard`: plain modules, full parameters and full optimizer state."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_FSDP = "torch.distributed.fsdp"


class Unsharded:
    """The model before `fully_shard`, which changes classes, attributes and hooks of modules. torch cannot undo it."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._before = {module: (type(module), set(vars(module))) for module in model.modules()}

    def restore(self, optimizer: Optimizer) -> None:
        """Give every rank the full model. A collective."""
        module: Any
        for module in self._model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        full: dict[Any, nn.Parameter] = {}
        for module in self._model.modules():
            for name, p in module._parameters.items():
                if p is not None and p not in full:
                    full[p] = _full_parameter(p)
                module._parameters[name] = None if p is None else full[p]
        for group in optimizer.param_groups:
            group["params"] = [full.get(p, p) for p in group["params"]]
        for old in list(optimizer.state):
            state = optimizer.state.pop(old)
            new: Tensor = full.get(old, old)
            optimizer.state[new] = {k: _full(v) if isinstance(v, Tensor) else v for k, v in state.items()}
        for module, (kind, attributes) in self._before.items():
            module.__class__ = kind
            for name in set(vars(module)) - attributes:
                if "fsdp" in name or "composable_api" in name:
                    del vars(module)[name]
            _remove_hooks(module)


def _remove_hooks(module: nn.Module) -> None:
    tables = [table for name, table in vars(module).items() if "hooks" in str(name) and isinstance(table, dict)]
    ours = {key for table in tables for key, hook in table.items() if _origin(hook).startswith(_FSDP)}
    for table in tables:
        for key in ours & set(table):
            del table[key]


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
