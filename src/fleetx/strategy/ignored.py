"""Attributes of Paddle's strategy that have no part here: accepted without effect, or rejected with a reason.

`execution_strategy` and `build_strategy` configure Paddle's graph executor, which fleetx does not have. Their fields
are kept, compared and saved, and `explain` reports that they have no effect.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fleetx.base.suggest import did_you_mean, shown
from fleetx.errors import NOT_BUILT, StrategyError

# Settings that Paddle had on BuildStrategy before DistributedStrategy existed.
_ON_THE_STRATEGY = (
    "fuse_all_reduce_ops",
    "hierarchical_allreduce_inter_nranks",
    "nccl_comm_num",
    "sync_batch_norm",
    "use_hierarchical_allreduce",
)


class _GraphSettings:
    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        known = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        if name not in known:
            hint = did_you_mean(name, known, otherwise=f"the settings are {', '.join(known)}")
            hint = "set it on fleet.DistributedStrategy()" if name in _ON_THE_STRATEGY else hint
            raise AttributeError(f"{type(self).__name__} has no {name!r}: {hint}")
        object.__setattr__(self, name, value)


@dataclass(slots=True)
class ExecutionStrategy(_GraphSettings):
    """Paddle's executor settings."""

    num_threads: int = 1
    num_iteration_per_drop_scope: int = 10
    num_iteration_per_run: int = 1
    use_thread_barrier: bool = False


@dataclass(slots=True)
class BuildStrategy(_GraphSettings):
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


_RECORDS = (ExecutionStrategy, BuildStrategy)

_DEFAULTS: dict[str, tuple[Any, str]] = {
    "execution_strategy": (ExecutionStrategy(), "there is no graph executor: PyTorch runs the model eagerly"),
    "build_strategy": (BuildStrategy(), "there is no graph to build: use torch.compile to fuse operations"),
    "sync_nccl_allreduce": (True, "the update always waits for the reduction"),
    "last_comm_group_size_MB": (1.0, "DistributedDataParallel chooses the size of its first bucket"),
    "fuse_grad_size_in_num": (8, "buckets are measured in bytes: use fuse_grad_size_in_MB"),
    "cudnn_exhaustive_search": (True, "use torch.backends.cudnn.benchmark"),
    "cudnn_batchnorm_spatial_persistent": (True, "PyTorch chooses the BatchNorm kernel"),
    "conv_workspace_size_limit": (4000, "PyTorch sizes its own workspaces"),
    "without_graph_optimization": (False, "there is no graph"),
}

_SERVER = f"parameter-server training {NOT_BUILT}: remove it and train collectively"
_TENSOR_PARALLEL = f"tensor parallelism {NOT_BUILT}: use sharding or pipeline"
_QUANTIZATION = f"quantization {NOT_BUILT}: remove it"
UNSUPPORTED: dict[str, str] = {
    "a_sync": _SERVER,
    "a_sync_configs": _SERVER,
    "elastic": "restarts are an option of the launcher: use fleetrun --max_restarts or --elastic",
    "tensor_parallel": _TENSOR_PARALLEL,
    "tensor_parallel_configs": _TENSOR_PARALLEL,
    "hybrid_configs": "set the pipeline and sharding switches; data parallelism uses the remaining ranks",
    "asp": f"weight sparsity {NOT_BUILT}: remove it",
    "qat": _QUANTIZATION,
    "qat_configs": _QUANTIZATION,
}


def defaults() -> dict[str, Any]:
    return {name: copy.deepcopy(default) for name, (default, _) in _DEFAULTS.items()}


def checked(name: str, value: Any) -> Any:
    """Return the value if its type matches the default's. A record may be any object or dict with the same fields."""
    default = _DEFAULTS[name][0]
    if isinstance(default, _RECORDS):
        return _record(name, default, value)
    if type(value) is not type(default) and not (isinstance(default, float) and type(value) is int):
        raise StrategyError(f"{name} = {shown(value)}: must be a {type(default).__name__} (default {default!r})")
    return value


def reasons(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The names whose value differs from the default, each with the reason why it has no effect."""
    return ((name, reason) for name, (default, reason) in _DEFAULTS.items() if values[name] != default)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that differ from their defaults, as plain data."""
    given = {name: values[name] for name, _ in reasons(values)}
    return {name: dataclasses.asdict(v) if isinstance(v, _RECORDS) else v for name, v in given.items()}


def _record(name: str, default: Any, value: Any) -> Any:
    fields = [f.name for f in dataclasses.fields(default)]
    known = f"possible fields: {', '.join(fields)}"
    if isinstance(value, Mapping):
        given = dict(value)
    else:
        given = {f: getattr(value, f) for f in fields if hasattr(value, f)}
        given |= {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_")}
        if not given:
            raise StrategyError(f"{name} = {shown(value)}: must be a dict or an object; {known}")
    for key, item in given.items():
        if key not in fields:
            raise StrategyError(f"{name} has no {shown(key)}: {did_you_mean(key, fields, otherwise=known)}")
        kind = type(getattr(default, key))
        if type(item) is not kind:
            raise StrategyError(f"{name}.{key} = {shown(item)}: must be {kind.__name__}")
    return dataclasses.replace(default, **given)
