"""Which part of the model this rank holds. Without sharding or stages, every rank holds all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from fleetx.comm import peers
from fleetx.comm.world import World
from fleetx.engine.dtensors import local
from fleetx.strategy.part import Part

_EVALUATE_TOGETHER = (
    "a rank has only part of the model, so every rank must evaluate, with the same number of batches "
    "(`for batch in fleet.join(loader)` stops all ranks together)"
)


@dataclass
class Layout:
    """Parts fill it in at MODEL, through SetupContext."""

    replica_group: World  # ranks that take different batches and train the same stage together
    replicas: World  # of these, the ranks that hold the same shards; the network connects them
    island: World | None = None  # ranks that update with the same gradient, if islands update on their own
    shard_group: World | None = None  # ranks that together hold one copy; None: each rank has a copy
    reduced: bool = False  # does backward itself reduce gradients?
    leaves: Callable[[], Iterable[Tensor]] | None = None  # where backward accumulates, if not in the parameters
    counts: Callable[[nn.Parameter], bool] = lambda p: True  # does this rank count it in a sum over the model?
    absent: frozenset[str] = frozenset()  # names that only other ranks hold

    @property
    def shard(self) -> int:
        """Which shard of each parameter this rank holds."""
        return self.shard_group.rank if self.reduced and self.shard_group is not None else 0

    @property
    def sharing(self) -> list[int] | None:
        """The global ranks that together hold one copy; None: every rank."""
        return None if self.shard_group is None else self.shard_group.numbers

    def meet_to_evaluate(self) -> None:
        """Wait for the ranks that together hold one copy; raise an error within seconds if one does not evaluate."""
        peers.meet(peers.EVALUATION, otherwise=_EVALUATE_TOGETHER, ranks=self.sharing)

    def norm(self, grads: list[Tensor], params: Iterable[nn.Parameter]) -> Tensor:
        """The 2-norm of the whole gradient, over all shards and stages."""
        if self.shard_group is None:
            return get_total_norm(grads)
        mine = [local(p.grad) for p in params if p.grad is not None and self.counts(p)]
        own = get_total_norm(mine)
        square = own.to(self.shard_group.device, torch.float64).reshape(1).square()  # float32 overflows at 1e19
        self.shard_group.sum(square)
        return square.sqrt().reshape(()).to(own.dtype if mine else torch.float64)


def of(parts: Iterable[Part], model: nn.Module, world: World) -> Layout:
    parts = list(parts)
    span = math.prod(part.span(model, world) for part in parts)
    group = _strided(world, span)
    return Layout(group, _strided(group, math.prod(part.shards(group) for part in parts)))


def _strided(world: World, step: int) -> World:
    """The world of this rank and those that are a multiple of `step` ranks away."""
    return world.split([list(range(first, world.size, step)) for first in range(step)])
