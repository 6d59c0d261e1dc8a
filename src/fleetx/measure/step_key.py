"""A key for everything that the prediction of a step depends on."""

from __future__ import annotations

import hashlib
import platform
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fleetx.base.module_names import named_modules
from fleetx.base.trees import tensors_of
from fleetx.measure.fake_step import Step

_VERSION = 1  # of what is stored


def key(step: Step, budget: Any) -> str:
    """All that the choice depends on."""
    tensors = tensors_of((step.args, step.kwargs))
    others = [x for x in pytree.tree_leaves((step.args, step.kwargs)) if isinstance(x, int | float | str | None)]
    groups = [{k: repr(v) for k, v in g.items() if k not in ("params", "lr")} for g in step.optimizer.param_groups]
    modules = [(name, type(m).__qualname__, m.extra_repr(), m.training) for name, m in named_modules(step.model)]
    about = (
        _VERSION, torch.__version__, platform.node(), platform.processor(), torch.get_num_threads(), str(step.device),
        modules, [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in step.model.named_parameters()],
        [(tuple(t.shape), t.stride(), str(t.dtype), t.requires_grad) for t in tensors], repr(others), repr(budget),
        type(step.optimizer).__qualname__, groups, [len(g["params"]) for g in step.optimizer.param_groups],
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
        [repr(part) for part in step.parts], step.kept_gradients, step.beside, step.batch,
    )  # fmt: skip
    return hashlib.sha256(repr(about).encode()).hexdigest()[:32]
