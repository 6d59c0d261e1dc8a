"""Choices that were made before, for the same model, shapes, budget and machine: a restart need not probe again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fleetx.memory.trace import Step
from fleetx.structure import named_modules, tensors_of

log = logging.getLogger(__name__)
_VERSION = 1  # of what is stored


def folder(of: str = "recompute") -> Path | None:
    """FLEETX_CACHE, or the user's cache; None where FLEETX_CACHE is empty: then nothing is stored."""
    set_ = os.environ.get("FLEETX_CACHE")
    if set_ == "":
        return None
    root = Path(set_) if set_ else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fleetx"
    return root / of


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


def load(name: str) -> dict[str, Any] | None:
    where = folder()
    try:
        return json.loads((where / f"{name}.json").read_text()) if where is not None else None
    except (OSError, ValueError):
        return None


def save(name: str, choice: Any) -> None:
    """Beside, then renamed: several ranks may write the same. A disk that is full or closed costs time only."""
    where = folder()
    if where is None:
        return
    try:
        where.mkdir(parents=True, exist_ok=True)
        beside = where / f"{name}.{os.getpid()}"
        beside.write_text(json.dumps(dataclasses.asdict(choice)))
        beside.replace(where / f"{name}.json")
    except OSError as error:
        log.warning("the choice of what to recompute could not be stored: %s", error)
