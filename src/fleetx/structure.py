"""Look into what a model returns (tuples, dicts, dataclasses, outputs of transformers) and into the model itself."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with every tensor replaced. A dataclass that torch does not know is copied field by field."""
    return pytree.tree_map(lambda leaf: _leaf(function, leaf), value)


def _leaf(function: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        leaf = copy.copy(leaf)  # not `replace`: it would run __init__ and __post_init__ again
        for field in dataclasses.fields(leaf):
            object.__setattr__(leaf, field.name, map_tensors(function, getattr(leaf, field.name)))
    return leaf


def sparse_modules(model: nn.Module) -> str:
    """Names of the modules whose gradients are sparse tensors, which most acts on gradients cannot take."""
    return ", ".join(name for name, module in model.named_modules() if getattr(module, "sparse", False) is True)
