"""What a rank holds after the model is cut. Parameters of other stages lose their data; shared ones are kept equal.

`gather` gives every rank the whole model and optimizer state again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.module_names import named_modules, plain_name
from fleetx.base.seams import reparametrize_module
from fleetx.base.wrapping import Layer, wrap
from fleetx.comm.world import World
from fleetx.errors import UsageError
from fleetx.parts.pipeline.trace import Interceptor, StageMap


class StageParams:
    """The parameters of a model by stage. Calls to its modules go through `interceptor`, if it is set."""

    def __init__(self, model: nn.Module, stage_map: StageMap, rank_of: Callable[[int], int], group: World):
        """rank_of: maps a stage to its rank in the group."""
        self.stage_map = stage_map
        self.interceptor: Interceptor | None = None
        self._group = group
        self._stages = _stages(model, stage_map)
        self._ranks = {p: sorted({rank_of(s) for s in stages}) for p, stages in self._stages.items()}
        self.shared = self._shared()
        for name, module in named_modules(model):
            if name in stage_map.stages or name in stage_map.starts:
                wrap(module, Layer.STAGE, partial(self._call, name))

    def _call(self, name: str, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if (interceptor := self.interceptor) is None:
            return inner(*args, **kwargs)
        args, kwargs = interceptor.enter(name, args, kwargs)
        if name in self.stage_map.stages:
            return interceptor.call(name, module, inner, args, kwargs)
        return inner(*args, **kwargs)

    def counts(self, p: nn.Parameter) -> bool:
        """Does this rank count the parameter in a sum over the model? Of the ranks that hold it, the first does."""
        return self._ranks[p][0] == self._group.rank

    def of(self, stage: int) -> list[nn.Parameter]:
        return [p for p, stages in self._stages.items() if stage in stages]

    def drop_others(self, optimizer: Optimizer) -> None:
        """Free the data of all other stages. Their parameters stay, on the "meta" device, so names do not change."""
        for p, ranks in self._ranks.items():
            if self._group.rank not in ranks:
                if p.grad is not None:
                    raise UsageError(
                        "the checkpoint was taken in the middle of a gradient_merge window by a pipeline that was cut "
                        "elsewhere: call fleet.flush() before saving, or set pipeline_configs['stages']"
                    )
                optimizer.state.pop(p, None)
                torch.utils.swap_tensors(p, nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad))

    # --- parameters that several stages use -------------------------------------------------------
    def _shared(self) -> list[tuple[World, list[nn.Parameter]]]:
        by_ranks: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for p, ranks in self._ranks.items():
            if len(ranks) > 1:
                by_ranks[tuple(ranks)].append(p)
        groups = [(self._group.subset(list(ranks)), by_ranks[ranks]) for ranks in sorted(by_ranks)]
        return [(group, params) for group, params in groups if group is not None]

    def sum_shared(self) -> None:
        """Add up the gradients of parameters that several stages use."""
        for group, params in self.shared:
            trained = [p for p in params if p.requires_grad]
            if not trained:
                continue
            used = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8, device=group.device)
            group.maximum(used)
            for p, yes in zip(trained, used.tolist(), strict=True):
                if yes:
                    p.grad = p.grad if p.grad is not None else torch.zeros_like(p)
                    group.sum(p.grad)


def _stages(model: nn.Module, stage_map: StageMap) -> dict[nn.Parameter, set[int]]:
    """The stages of each parameter: all, if it is outside every unit, because code between modules may read it."""
    stages: dict[nn.Parameter, set[int]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        stage = stage_map.stage_of(plain_name(name).rpartition(".")[0])
        stages.setdefault(p, set()).update(range(stage_map.number) if stage is None else {stage})
    return stages


def copied_buffers(model: nn.Module) -> AbstractContextManager[Any]:
    """The model with copies of its buffers, for a forward that must not change them."""
    return reparametrize_module(model, {n: b.clone() for n, b in model.named_buffers(remove_duplicate=False)})


def absent_names(model: nn.Module, stage_map: StageMap, mine: list[int]) -> Iterator[str]:
    """Parameters without data, and buffers of other stages, which are outdated here."""
    yield from (name for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta)
    for name, _ in model.named_buffers():
        stage = stage_map.stage_of(plain_name(name).rpartition(".")[0])
        if stage is not None and stage not in mine:
            yield name


# --- the whole model again ------------------------------------------------------------------------
def gather(model: nn.Module, optimizer: Optimizer, group: World, device: torch.device, absent: frozenset[str]) -> None:
    """Restore the whole model: a collective of one pipeline's ranks. Each tensor comes from the first that holds it."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    elsewhere = {name for name, t in tensors.items() if t.is_meta or name in absent}
    held = group.gather(torch.tensor([name not in elsewhere for name in tensors], dtype=torch.uint8, device=device))
    owners = dict(zip(tensors, held.argmax(0).tolist(), strict=True))
    for t in tensors.values():
        if t.is_meta:
            torch.utils.swap_tensors(t, nn.Parameter(torch.empty_like(t, device=device), requires_grad=t.requires_grad))
    for rank in range(group.size):
        group.broadcast([t.detach() for name, t in tensors.items() if owners[name] == rank], source=rank)
    _gather_state(model, optimizer, group, device, owners)


def _gather_state(
    model: nn.Module, optimizer: Optimizer, group: World, device: torch.device, owners: dict[str, int]
) -> None:
    params = dict(model.named_parameters())
    mine = {n: _described(optimizer.state.get(p, {})) for n, p in params.items() if owners[n] == group.rank}
    for rank, described in enumerate(group.gather_json(mine)):
        sent: list[Tensor] = []
        for name, entries in described.items():
            state = optimizer.state[params[name]] if entries else {}
            for key, entry in entries.items():
                if not isinstance(entry, dict):
                    state[key] = entry
                    continue
                if rank != group.rank:
                    state[key] = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]), device=entry["on"])
                sent.append(state[key])
        _broadcast(sent, group, rank, device)


def _broadcast(tensors: list[Tensor], group: World, source: int, device: torch.device) -> None:
    """Broadcast through `device`: Adam's `step`, for example, is on the CPU even if the group only connects GPUs."""
    moved = [t.to(device) for t in tensors]
    group.broadcast(moved, source=source)
    for t, m in zip(tensors, moved, strict=True):
        t.copy_(m)


def _described(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {"shape": list(v.shape), "dtype": str(v.dtype).removeprefix("torch."), "on": v.device.type}
        if isinstance(v, Tensor) else v
        for key, v in state.items()
    }  # fmt: skip
