"""Tensors in nested structures: tuples, dicts, dataclasses, outputs of transformers; and the loss among them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fleetx.base.seams import pytree
from fleetx.errors import UsageError

Function = Callable[[Any], Any]
Kind = type | tuple[type, ...]
LossFn = Callable[..., Tensor]
_LEAVES = (type(None), bool, int, float, str)  # these contain no tensors


def map_tensors(function: Function, value: Any, *, strict: bool = False, kind: Kind = Tensor) -> Any:
    """Apply a function to every tensor in a structure. Types unknown to torch's pytree are copied field by field.

    If nothing was replaced, the same object is returned: the model may write into its arguments.

    strict: raise an error for an object that hides a tensor with a gradient, instead of skipping it.
    kind: the type to replace, if not tensors.
    """
    return _map(function, value, strict, kind, ())


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a structure, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    """Plain structures are walked here: pytree takes twenty times as long, and this is called in every step."""
    kind = type(value)
    if isinstance(value, Tensor):
        found.append(value)
    elif kind is tuple or kind is list:
        for item in value:
            _collect(item, found)
    elif kind is dict:
        for item in value.values():
            _collect(item, found)
    elif kind not in _LEAVES:

        def see(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        map_tensors(see, value)


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as a view of its real and imaginary parts: backends reduce and round real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Do these strides give each element of a tensor its own place in memory, without gaps?"""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def samples_in(value: Any) -> int:
    """How many samples a batch has: the most common first dimension of its tensors; 0 without tensors."""
    return samples_of(tensors_of(value))


def samples_of(tensors: list[Tensor]) -> int:
    lengths = [len(t) for t in tensors if t.dim()]
    return max(lengths, key=lengths.count, default=0)


def _map(function: Function, value: Any, strict: bool, kind: Kind, above: tuple[int, ...]) -> Any:
    leaves, structure = pytree.tree_flatten(value)
    mapped = [_leaf(function, leaf, strict, kind, above) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(mapped, structure)


def _leaf(function: Function, leaf: Any, strict: bool, kind: Kind, above: tuple[int, ...]) -> Any:
    """above: ids of the enclosing objects, because a structure may contain itself."""
    if isinstance(leaf, kind):
        return function(leaf)
    record = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
    if (record or isinstance(leaf, dict)) and id(leaf) not in above:  # a subclass of dict is a leaf to pytree
        above = (*above, id(leaf))
        items = (
            dict(leaf) if isinstance(leaf, dict) else {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
        )
        mapped = {key: _map(function, item, strict, kind, above) for key, item in items.items()}
        if all(mapped[key] is items[key] for key in items):
            return leaf
        out: Any = copy.copy(leaf)  # not `dataclasses.replace`: it would run __init__ and __post_init__ again
        for key, item in mapped.items():
            out.__setitem__(key, item) if isinstance(leaf, dict) else object.__setattr__(out, key, item)
        return out
    if strict and (hidden := _hidden(leaf)):
        raise UsageError(
            f"the model returns a {type(leaf).__name__}, and the strategy cannot see the gradient of its {hidden}: "
            "return the tensors in a tuple, a dict or a dataclass, or compute the loss inside the model"
        )
    return leaf


def _hidden(leaf: Any) -> str:
    """The name of an attribute that is a tensor requiring a gradient, or \"\"."""
    if isinstance(leaf, nn.Module) or not hasattr(leaf, "__dict__"):
        return ""
    return next((k for k, v in vars(leaf).items() if isinstance(v, Tensor) and v.requires_grad), "")


def loss_of(out: Any) -> Tensor | None:
    """The loss that a model returned: a tensor with one element, or the `loss` of its output; else None."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    found = out if isinstance(out, Tensor) else loss
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


def loss_by(model: Callable[..., Any], inputs: Any, target: Any, loss_fn: LossFn | None) -> Tensor:
    """The loss of a batch. A dict is passed to the model as keyword arguments, a tuple or list as positional ones."""
    args, kwargs = arguments(inputs)
    out = model(*args, **kwargs)
    loss: Any = loss_of(out)
    if loss_fn is not None:
        loss = loss_fn(out) if target is None else loss_fn(out, target)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError("forward_backward needs a scalar loss: pass loss_fn=..., or have the model return its loss")
    return loss


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave out the key-value cache of a transformers model: a second pass would append to it again."""
    return tuple(map(_no_cache, args)), {k: _no_cache(v) for k, v in kwargs.items()}


def _no_cache(value: Any) -> Any:
    if not any(c.__name__ == "Cache" and c.__module__.startswith("transformers.") for c in type(value).__mro__):
        return value
    if value.get_seq_length() > 0:
        raise UsageError("recompute cannot rerun a forward with a filled cache: pass no past_key_values while training")
    return None
