"""What a rank holds after the cut. The rest has no data; weights that several stages use are kept equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer

from fleetx.base.module_names import named_modules, plain_name
from fleetx.base.wrapping import Layer, wrap
from fleetx.comm.world import World
from fleetx.errors import UsageError
from fleetx.parts.pipeline.trace import Units, Visitor


class Cut:
    """A model of which this rank holds some stages."""

    def __init__(self, model: nn.Module, units: Units, ranks: Callable[[int], int], group: World):
        """ranks: which rank of the group a stage is on."""
        self.units = units
        self.visitor: Visitor | None = None
        self._group = group
        self._stages = dict(_stages(model, units))
        self._on = {p: sorted({ranks(s) for s in stages}) for p, stages in self._stages.items()}
        self.shared = self._shared()
        for name, module in named_modules(model):
            if name in units.stages or name in units.starts:
                wrap(module, Layer.STAGE, partial(self._call, name))

    def _call(self, name: str, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if (visitor := self.visitor) is None:
            return inner(*args, **kwargs)
        args, kwargs = visitor.enter(name, args, kwargs)
        if name in self.units.stages:
            return visitor.call(name, module, inner, args, kwargs)
        return inner(*args, **kwargs)

    def holds(self, p: nn.Parameter) -> bool:
        return self._group.rank in self._on[p]

    def counts(self, p: nn.Parameter) -> bool:
        """Of several ranks that hold it, the first counts it where something is summed up."""
        return self._on[p][0] == self._group.rank

    def params(self, stage: int) -> list[nn.Parameter]:
        return [p for p, stages in self._stages.items() if stage in stages]

    def drop(self, optimizer: Optimizer) -> None:
        """Let go of the data of all other stages. The parameters stay, without data: their names are still there."""
        for p in self._stages:
            if not self.holds(p):
                if p.grad is not None:
                    raise UsageError(
                        "the checkpoint was taken inside of a merge window by a pipeline that was cut elsewhere: call "
                        "fleet.flush() before saving, or name the stages"
                    )
                optimizer.state.pop(p, None)
                torch.utils.swap_tensors(p, nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad))

    # --- weights that several stages use ----------------------------------------------------------
    def _shared(self) -> list[tuple[World, list[nn.Parameter]]]:
        by: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for p, on in self._on.items():
            if len(on) > 1:
                by[tuple(on)].append(p)
        found = [(self._group.subset(list(ranks)), by[ranks]) for ranks in sorted(by)]
        return [(world, params) for world, params in found if world is not None]

    def tie(self) -> None:
        """Add up the gradients of weights that several stages use."""
        for world, params in self.shared:
            trained = [p for p in params if p.requires_grad]
            if not trained:
                continue
            used = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8, device=world.device)
            world.maximum(used)
            for p, yes in zip(trained, used.tolist(), strict=True):
                if yes:
                    p.grad = p.grad if p.grad is not None else torch.zeros_like(p)
                    world.sum(p.grad)


def _stages(model: nn.Module, units: Units) -> Iterator[tuple[nn.Parameter, set[int]]]:
    """Of each parameter. One that belongs to no unit is read by code between modules, which may be anywhere."""
    found: dict[nn.Parameter, set[int]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        stage = units.of(plain_name(name).rpartition(".")[0])
        found.setdefault(p, set()).update(range(units.number) if stage is None else {stage})
    yield from found.items()


def own_buffers(model: nn.Module) -> AbstractContextManager[Any]:
    """The model with copies of its buffers, which a forward that does not count may change."""
    return _reparametrize_module(model, {n: b.clone() for n, b in model.named_buffers(remove_duplicate=False)})


def buffers_elsewhere(model: nn.Module, units: Units, mine: list[int]) -> Iterator[str]:
    """Names of the buffers of other stages, which are not up to date here."""
    for name, _ in model.named_buffers():
        stage = units.of(plain_name(name).rpartition(".")[0])
        if stage is not None and stage not in mine:
            yield name
