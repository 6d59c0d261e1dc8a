"""Parameters that are divided between ranks: DTensors, and the part of them that this rank holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fleetx.base import seams
from fleetx.base.module_names import plain_name
from fleetx.comm.world import World
from fleetx.engine.taps import OF_SHARDS, tap
from fleetx.errors import NOT_BUILT, StrategyError, UsageError


@cache
def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor


def local(t: Tensor) -> Tensor:
    """The part of a tensor that this rank holds. Not a copy: it can be changed in place."""
    if type(t) in (Tensor, nn.Parameter) or not isinstance(t, _dtensor()):
        return t
    return seams.local_tensor(t)


def shard_of(p: Tensor, part: Tensor) -> Tensor:
    """This rank's part, as a shard of a tensor that is divided like this parameter."""
    if local(p) is p:
        return part
    whole: Any = p
    return _dtensor().from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


class WholeReader:
    """`p.full_tensor()` of a sharded parameter in a loss: each rank's gradient counts, as in data parallelism.

    torch assumes that the gradient of the whole tensor is equal on all ranks, and keeps only this rank's part of its
    own gradient.
    """

    def __init__(self, p: Any, replicas: World | None, *, momentum: bool = False):
        """replicas: the ranks that hold the same shard, unless they update on their own.

        momentum: do the gradients that a backward leaves contain momentum?
        """
        self._p, self._replicas, self._momentum, self._expected = weakref.ref(p), replicas, momentum, False
        p.full_tensor = self  # found before the class's method
        p.register_hook = _refuse_hook

    def __call__(self, *, grad_placements: Any = None) -> Tensor:
        from torch.distributed.tensor import Partial

        p: Any = self._p()
        if grad_placements is not None or not p.requires_grad or not torch.is_grad_enabled():
            return cast("Tensor", type(p).full_tensor(p, grad_placements=grad_placements))
        if self._momentum:
            raise UsageError(
                f"p.full_tensor() in a loss, while gradients contain momentum (dgc), {NOT_BUILT}: set "
                "dgc_configs['momentum_correction'] = False, or decay the weights in the optimizer"
            )
        mesh = p.device_mesh
        return tap(type(p).full_tensor(p, grad_placements=[Partial()] * mesh.ndim), partial(self._mean, mesh.size()))

    def _mean(self, ranks: int, grad: Tensor) -> Tensor:
        self._expected = True
        if self._replicas is None:
            return grad / ranks
        mean = (grad / (ranks * self._replicas.size)).contiguous()
        self._replicas.sum(mean)
        return mean

    def check(self, grad: Tensor) -> None:
        """Called when a backward reaches the shard itself, other than through FSDP."""
        if not self._expected:
            raise UsageError(OF_SHARDS)
        self._expected = False

    def remove(self) -> None:
        if (p := self._p()) is not None:
            for name in ("full_tensor", "register_hook"):
                vars(p).pop(name, None)


def _refuse_hook(hook: Any) -> Any:
    raise UsageError(HOOKED.format("a sharded parameter"))


HOOKED = (
    "FSDP does not call register_hook's function on {}, because backward computes the gradient of a gathered copy: use "
    "register_post_accumulate_grad_hook, or a hook on the module, or turn sharding off"
)


def refuse_pickling(values: Iterable[Any]) -> None:
    """Have torch.save and pickle raise an error for shards; parameters themselves are left alone."""
    for t in values:
        if isinstance(t, Tensor) and not isinstance(t, nn.Parameter) and local(t) is not t:
            t.__reduce_ex__ = _refuse  # type: ignore[method-assign]


def _refuse(protocol: Any) -> Any:
    raise UsageError(
        "this state_dict has only the shards of this rank, so torch.save would write a part of each tensor: use "
        "fleet.save(folder) on every rank, or make whole tensors with v.full_tensor() on every rank before saving"
    )


def renamed(
    before: Mapping[nn.Parameter, str], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[nn.Parameter, str]:
    """The names of a model's parameters after some may have been replaced. The optimizer is given the new ones.

    A collective if they are divided and the optimizer has state.
    """
    now = {p: plain_name(n) for n, p in model.named_parameters()}
    if list(before.values()) != list(now.values()):
        raise StrategyError("a MODEL act changed the names of parameters")
    replaced = dict(zip(before, now, strict=True))
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
    for old, new in replaced.items():
        if old is not new and old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {k: _divided(v, new) if isinstance(v, Tensor) else v for k, v in state.items()}
    return now


def _divided(t: Tensor, p: Tensor) -> Tensor:
    """Divide a tensor of the optimizer's state like its parameter, using the values of rank 0."""
    if local(p) is p or t.shape != p.shape:
        return t
    from torch.distributed.tensor import distribute_tensor

    whole: Any = p
    return distribute_tensor(t, whole.device_mesh, whole.placements)
