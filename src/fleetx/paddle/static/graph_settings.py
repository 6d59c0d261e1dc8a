"""Settings of Paddle's graph executor: checked by name, without meaning here, which the strategy says."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from fleetx.strategy import ignored

# What Paddle's BuildStrategy had before there was a DistributedStrategy.
_OF_THE_STRATEGY = {
    "fuse_all_reduce_ops",
    "hierarchical_allreduce_inter_nranks",
    "nccl_comm_num",
    "sync_batch_norm",
    "use_hierarchical_allreduce",
}


def _set(self: Any, name: str, value: Any) -> None:
    known = [field.name for field in dataclasses.fields(self)]
    if name not in known:
        kind, near = type(self).__name__, difflib.get_close_matches(name, known, n=1)
        if name in _OF_THE_STRATEGY:
            raise AttributeError(f"{kind} has no {name!r}: set it on fleet.DistributedStrategy()")
        hint = f"did you mean {near[0]!r}?" if near else f"fleetx covers {', '.join(known)}"
        raise AttributeError(f"{kind} has no {name!r}: {hint}")
    object.__setattr__(self, name, value)


class ExecutionStrategy(ignored.ExecutionStrategy):
    __slots__ = ()
    __setattr__ = _set


class BuildStrategy(ignored.BuildStrategy):
    __slots__ = ()
    __setattr__ = _set
