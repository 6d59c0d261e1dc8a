"""Attributes of Paddle's strategy that are not parts: accepted with no meaning here, or refused with a reason.

`execution_strategy` and `build_strategy` steer Paddle's graph executor. There is none here, so their fields are kept,
compared and saved, and `explain` says that they change nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fleetx.errors import StrategyError


@dataclass(slots=True)  # slots: a field that does not exist is an AttributeError
class ExecutionStrategy:
    """Paddle's executor settings."""

    num_threads: int = 1
    num_iteration_per_drop_scope: int = 10
    num_iteration_per_run: int = 1
    use_thread_barrier: bool = False


@dataclass(slots=True)  # slots: a field that does not exist is an AttributeError
class BuildStrategy:
    """Paddle's graph settings."""

    enable_sequential_execution: bool = False
    fuse_elewise_add_act_ops: bool = False
    fuse_bn_act_ops: bool = False
    fuse_bn_add_act_ops: bool = True
    fuse_relu_depthwise_conv: bool = False
    fuse_broadcast_ops: bool = False
    fuse_all_optimizer_ops: bool = False
    enable_inplace: bool = False
    enable_addto: bool = False
    enable_auto_fusion: bool = False
    enable_backward_optimizer_op_deps: bool = True
    cache_runtime_context: bool = False


_IDLE: dict[str, tuple[Any, str]] = {
    "execution_strategy": (ExecutionStrategy(), "there is no graph executor: PyTorch runs the model eagerly"),
    "build_strategy": (BuildStrategy(), "there is no graph to build: use torch.compile to fuse operations"),
    "sync_nccl_allreduce": (True, "the reduction is always waited for before the update"),
    "last_comm_group_size_MB": (1.0, "DistributedDataParallel sizes its first bucket itself"),
    "fuse_grad_size_in_num": (8, "buckets are sized in bytes: fuse_grad_size_in_MB"),
    "cudnn_exhaustive_search": (True, "set torch.backends.cudnn.benchmark"),
    "cudnn_batchnorm_spatial_persistent": (True, "PyTorch chooses the kernel of BatchNorm itself"),
    "conv_workspace_size_limit": (4000, "PyTorch sizes its workspaces itself"),
    "without_graph_optimization": (False, "there is no graph"),
}

_PLAIN = (bool, int, float)

_SERVER = "parameter-server training is not part of fleetx; collective training is"
REFUSED: dict[str, str] = {
    "a_sync": _SERVER,
    "a_sync_configs": _SERVER,
    "elastic": "declare restarts to the launcher instead: fleetrun --max_restarts",
    "tensor_parallel": "tensor parallelism is not part of fleetx; sharding and pipeline are",
    "tensor_parallel_configs": "tensor parallelism is not part of fleetx; sharding and pipeline are",
    "hybrid_configs": "declare pipeline and sharding by their own switches; data parallelism takes the other ranks",
    "asp": "sparsity of weights is not part of fleetx",
    "qat": "quantisation is not part of fleetx",
    "qat_configs": "quantisation is not part of fleetx",
}


def idle_defaults() -> dict[str, Any]:
    return {name: copy.deepcopy(default) for name, (default, _) in _IDLE.items()}


def checked(name: str, value: Any) -> Any:
    """The value, if it has the type of the default; any object or dict with the right fields for the two records."""
    default = _IDLE[name][0]
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        return _record(name, default, value)
    if type(value) is not type(default) and not (isinstance(default, float) and type(value) is int):
        raise StrategyError(f"{name} = {value!r}: must be a {type(default).__name__} (default {default!r})")
    return value


def assigned(idle: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What differs from its default, with the reason why that changes nothing."""
    for name, (default, reason) in _IDLE.items():
        if idle[name] != default:
            yield name, reason


def plain(idle: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from its default, as plain data."""
    changed = {name: idle[name] for name, (default, _) in _IDLE.items() if idle[name] != default}
    return {name: v if isinstance(v, _PLAIN) else dataclasses.asdict(v) for name, v in changed.items()}


def _record(name: str, default: Any, value: Any) -> Any:
    fields = [f.name for f in dataclasses.fields(default)]
    if isinstance(value, Mapping):
        given = dict(value)
    else:
        given = {f: getattr(value, f) for f in fields if hasattr(value, f)}
        given |= {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_")}
        if not given:
            raise StrategyError(f"{name} = {value!r}: must have fields such as {', '.join(fields[:3])}")
    for key, found in given.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            raise StrategyError(f"{name} has no {key!r}" + (f": did you mean {near[0]!r}?" if near else ""))
        kind = type(getattr(default, key))
        if type(found) is not kind:
            raise StrategyError(f"{name}.{key} = {found!r}: must be {kind.__name__}")
    return type(default)(**{f: given.get(f, getattr(default, f)) for f in fields})
