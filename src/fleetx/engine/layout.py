"""What this rank holds of a model that is divided between ranks. Of one that is not, each holds everything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from fleetx.comm.world import World
from fleetx.engine.dtensors import local
from fleetx.strategy.part import Part


@dataclass
class Layout:
    """Parts fill it in at MODEL."""

    replica_group: World  # the ranks that hold the same piece as this one: they reduce its gradients with each other
    shard_group: World | None = None  # the ranks that hold one copy of the model together, where it is not one
    reduced: bool = False  # do gradients come out of backward reduced between all ranks already?
    counts: Callable[[nn.Parameter], bool] = lambda p: True  # is it for this rank to count it in a sum over the model?
    absent: frozenset[str] = frozenset()  # names of what only other ranks hold

    def norm(self, grads: list[Tensor], params: Iterable[nn.Parameter]) -> Tensor:
        """The 2-norm of the whole gradient, wherever its pieces are."""
        if self.shard_group is None:
            return get_total_norm(grads)
        mine = [local(p.grad) for p in params if p.grad is not None and self.counts(p)]
        square = get_total_norm(mine).to(self.shard_group.device, torch.float32).reshape(1).square()
        self.shard_group.sum(square)
        return square.sqrt().reshape(())


def of(parts: Iterable[Part], model: nn.Module, world: World) -> Layout:
    span = math.prod(part.span(model, world) for part in parts)
    return Layout(world.parted([list(range(first, world.size, span)) for first in range(span)]))
