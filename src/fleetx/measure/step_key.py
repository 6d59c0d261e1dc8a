"""What a prediction or a plan depends on: shapes, constants, and a key for everything about a step."""

from __future__ import annotations

import hashlib
import platform
from typing import Any

import torch

from fleetx.base.module_names import named_modules
from fleetx.base.seams import pytree
from fleetx.base.trees import tensors_of
from fleetx.measure.fake_step import TrainingStep

_VERSION = 2  # of the stored format


def shapes_of(value: Any) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
    """Shape, dtype and requires_grad of every tensor."""
    return [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_of(value)]


def constants_of(value: Any) -> str:
    """The numbers and strings next to the tensors: a forward may branch on them."""
    return repr([leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, int | float | str | None)])


def key(step: TrainingStep, extra: Any) -> str:
    """A name for the cache: equal only if everything that a prediction depends on is equal."""
    inputs = step.args, step.kwargs
    groups = [{k: repr(v) for k, v in g.items() if k not in ("params", "lr")} for g in step.optimizer.param_groups]
    about = (
        _VERSION, torch.__version__, platform.node(), platform.processor(), torch.get_num_threads(), str(step.device),
        [(name, type(m).__qualname__, m.extra_repr(), m.training) for name, m in named_modules(step.model)],
        [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in step.model.named_parameters()],
        shapes_of(inputs), [t.stride() for t in tensors_of(inputs)], constants_of(inputs), repr(extra),
        type(step.optimizer).__qualname__, groups, [len(g["params"]) for g in step.optimizer.param_groups],
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
        [repr(part) for part in step.parts], step.kept_gradients, step.extra_bytes, step.batch,
    )  # fmt: skip
    return hashlib.sha256(repr(about).encode()).hexdigest()[:32]
