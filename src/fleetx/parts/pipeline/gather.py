"""Gives every rank of a pipeline the whole model and optimizer state again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.comm.world import World


def gather(model: nn.Module, optimizer: Optimizer, group: World, device: torch.device, absent: frozenset[str]) -> None:
    """A collective over the ranks of one pipeline. Each tensor comes from the first rank that holds it."""
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
    """Counters such as Adam's `step` are on the CPU even if the group only communicates between GPUs."""
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
