"""`FleetStrategy`: a Lightning Fabric strategy that trains with a `DistributedStrategy`.

    fabric = Fabric(devices=2, strategy=FleetStrategy(fleet.DistributedStrategy(gradient_merge={"k_steps": 4})))

Fabric keeps its launcher, samplers and collectives. The model that `fabric.setup` returns is fleetx's.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision, Precision
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fleetx import fleet
from fleetx.errors import NOT_BUILT, StrategyError, UsageError
from fleetx.fleet.auto import checked
from fleetx.strategy import DistributedStrategy

_PRECISIONS = (Precision, DoublePrecision, HalfPrecision)  # compared by exact type: all others derive from the first


class FleetStrategy(DDPStrategy):
    """strategy: what to train with, including mixed precision, clipping and accumulation (amp, clip, gradient_merge)"""

    def __init__(self, strategy: DistributedStrategy | None = None):
        strategy = checked(strategy) if strategy is not None else DistributedStrategy()
        strategy.plan()
        if strategy.pipeline or strategy.auto:
            switch = "pipeline" if strategy.pipeline else "auto"
            raise StrategyError(f"{switch} in Fabric {NOT_BUILT}: write the loop with fleet.distribute")
        super().__init__()
        self._backward_sync_control = _NoSync()
        self._declared = strategy
        self._optimizers: WeakKeyDictionary[nn.Module, Optimizer] = WeakKeyDictionary()

    def setup_environment(self) -> None:
        """fleetx creates the process group, with a backend for each device; Fabric finds and uses it."""
        rank = self.node_rank * self.num_processes + self.local_rank
        place = {"RANK": rank, "WORLD_SIZE": self.num_nodes * self.num_processes, "LOCAL_RANK": self.local_rank}
        place |= {
            "MASTER_ADDR": self.cluster_environment.main_address,
            "MASTER_PORT": self.cluster_environment.main_port,
        }
        for name, value in place.items():
            os.environ.setdefault(name, str(value))
        fleet.init()
        super().setup_environment()
        if (fleet.worker_num(), fleet.device().type) != (self.world_size, self.root_device.type):
            raise UsageError(
                f"Fabric has {self.world_size} workers on {self.root_device.type}, but the launcher started "
                f"{fleet.worker_num()} on {fleet.device().type}: give Fabric the same devices and accelerator"
            )

    @DDPStrategy.precision.setter
    def precision(self, precision: Precision | None) -> None:
        if precision is not None and type(precision) not in _PRECISIONS:
            raise UsageError(
                f"precision={precision.precision!r} would run beside the strategy: remove it, and set "
                'amp={"dtype": "bfloat16"} or "float16" in the DistributedStrategy'
            )
        DDPStrategy.precision.fset(self, precision)

    # --- fabric.setup -----------------------------------------------------------------------------
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        if len(optimizers) != 1:
            raise UsageError(f"fabric.setup was given {len(optimizers)} optimizers: a strategy acts on exactly one")
        model, optimizer = fleet.distribute(module, optimizers[0], self._declared)
        self._optimizers[model] = optimizer
        return model, [optimizer], scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        if any(p.requires_grad for p in module.parameters()):
            raise UsageError(
                "fabric.setup was given a model without its optimizer: write fabric.setup(model, optimizer), or for "
                "evaluation alone call model.requires_grad_(False) first"
            )
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        raise UsageError("fabric.setup_optimizers was given an optimizer alone: write fabric.setup(model, optimizer)")

    # --- the loop ---------------------------------------------------------------------------------
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            raise UsageError(f"fabric.backward with arguments for torch {NOT_BUILT}: write fabric.backward(loss)")
        if module is None and len(self._optimizers) == 1:
            module = next(iter(self._optimizers))
        fleet.backward(tensor, optimizer=self._optimizers[module] if module is not None else None)

    def clip_gradients_norm(self, module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        """If the gradients are still scaled or summed here, the next step raises an error that names `clip`."""
        norm = super().clip_gradients_norm(module, optimizer, *args, **kwargs)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    # --- checkpoints ------------------------------------------------------------------------------
    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a folder with `fleet.save`."""
        if storage_options is not None or filter:
            raise UsageError(f"fabric.save with a filter or storage options {NOT_BUILT}: save everything")
        model, rest = self._sorted(state, "fabric.save")
        fleet.save(path, model=model, scheduler=_Rest(rest))

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder with `fleet.load`. A file comes from another Fabric strategy, so Fabric loads it."""
        if not Path(path).is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        model, rest = self._sorted(state if isinstance(state, dict) else {}, "fabric.load")
        found = _Rest(rest, strict=strict)
        fleet.load(path, model=model, scheduler=found)
        state.update(found.values)
        return found.unknown

    def _sorted(self, state: dict[str, Any], where: str) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model, and everything that is neither the model nor its optimizer."""
        models = [v for v in state.values() if isinstance(v, nn.Module) and v in self._optimizers]
        if len(models) != 1 or not any(v is self._optimizers[models[0]] for v in state.values()):
            raise UsageError(
                f'{where} keeps a model and its optimizer together: pass {{"model": model, "optimizer": optimizer}} as '
                "fabric.setup returned them. For the model alone, use fleet.export(folder)"
            )
        both = (models[0], self._optimizers[models[0]])
        return models[0], {key: v for key, v in state.items() if not any(v is each for each in both)}


class _NoSync:
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if enabled:
            raise UsageError(
                "no_backward_sync: gradient_merge decides when gradients are reduced. Set "
                'gradient_merge={"k_steps": k}, call optimizer.step() after every batch, and do not divide the loss'
            )
        return nullcontext()


class MissingError(UsageError, KeyError):
    """Also a KeyError, because that is what Fabric raises in this case."""


class _Rest:
    """Everything else that a script saves: objects with a state_dict, and plain values."""

    def __init__(self, items: dict[str, Any], *, strict: bool = True):
        self._items, self._strict = items, strict
        self.values: dict[str, Any] = {}
        self.unknown: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {key: v.state_dict() if hasattr(v, "state_dict") else v for key, v in self._items.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if self._strict and (missing := [key for key in self._items if key not in saved]):
            raise MissingError(f"the checkpoint has no {missing[0]!r}: it has {', '.join(saved) or 'no other values'}")
        for key, value in saved.items():
            if key not in self._items:
                self.unknown[key] = value
            elif hasattr(self._items[key], "load_state_dict"):
                self._items[key].load_state_dict(value)
            else:
                self.values[key] = value
