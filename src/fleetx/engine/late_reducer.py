"""Reduces gradients on request, after backward: for pipelines, shards and merge windows that end without a backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.futures import Future

from fleetx.base.trees import as_real
from fleetx.comm.averaging import buckets, pack, views
from fleetx.comm.world import World
from fleetx.engine.context import Bucket
from fleetx.engine.dtensors import local, shard_of
from fleetx.engine.guests import ParameterSlots

ReduceBucket = Callable[[Bucket], Future[Tensor]]


class LateReducer:
    """Reduces gradients on request, after backward."""

    def __init__(self, names: Mapping[nn.Parameter, str], world: World, bucket_cap_mb: float):
        self._names, self._world, self._cap = names, world, bucket_cap_mb * 1024 * 1024
        self.order: list[str] | None = None  # of the parameters in the buckets, once they were reordered

    def restore_order(self, order: list[str] | None) -> None:
        """No-op: the order of its buckets never changes."""

    def check_finished(self, slots: ParameterSlots) -> None:
        """No-op: nothing is pending after backward."""

    def reduce_now(self, params: list[nn.Parameter], reduce: ReduceBucket) -> None:
        """Reduce gradients that no backward reduced, one bucket at a time to avoid a copy as large as the model."""
        if not params:  # the same on every rank of the group
            return
        used = torch.tensor([p.grad is not None for p in params], dtype=torch.uint8, device=params[0].device)
        self._world.maximum(used)  # a gradient that only one rank has counts as zero on the others
        self._reduce_all([p for p, u in zip(params, used.tolist(), strict=True) if u], reduce)

    def _reduce_all(self, params: list[nn.Parameter], reduce: ReduceBucket) -> None:
        params = params[::-1]  # the order in which backward computes them
        for index, bucket in enumerate(buckets(params, self._cap)):
            group = [params[i] for i in bucket]
            grads = [_gradient(p) for p in group]
            real = [as_real(g) for g in grads]
            flat = pack(real)
            if len(flat):  # a rank may hold no part of parameters that others hold
                flat = reduce(Bucket(flat, views(flat, real), [self._names[p] for p in group], index)).wait()
            for p, grad, g, v in zip(group, grads, real, views(flat, real), strict=True):
                g.copy_(v)
                p.grad = shard_of(p, grad)


def _gradient(p: nn.Parameter) -> Tensor:
    """This rank's part of the gradient; zeros if there is none."""
    return local(p.grad).resolve_conj() if p.grad is not None else torch.zeros_like(local(p))
