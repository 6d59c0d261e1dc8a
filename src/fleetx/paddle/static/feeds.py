"""Turn a feed into the tensors of a program's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetx.applications import Application, Variable
from fleetx.base.suggest import did_you_mean
from fleetx.errors import UsageError


def tensors(application: Application, feed: Any) -> dict[str, Tensor]:
    """Return the batch on the application's device. `feed` is a dict, or a list that holds one."""
    if isinstance(feed, list | tuple) and len(feed) == 1:
        feed = feed[0]
    if not isinstance(feed, Mapping):
        given = f"a list of {len(feed)}" if isinstance(feed, list | tuple) else repr(feed)
        raise UsageError(f"feed must be a dict of arrays by name, or a list with one such dict, not {given}")
    known = {variable.name: variable for variable in application.inputs}
    for name in feed:
        if name not in known:
            hint = did_you_mean(name, known, otherwise=f"its inputs are {', '.join(known)}")
            raise UsageError(f"{type(application).__name__} has no input {name!r}: {hint}")
    required = _required(application)
    if missing := [name for name in known if name not in feed and name in required]:
        raise UsageError(f"feed lacks {', '.join(missing)}: {type(application).__name__} needs it")
    device = next((p.device for p in application.parameters() if not p.is_meta), torch.device("cpu"))
    batch = {name: _tensor(known[name], feed[name], device) for name in known if name in feed}
    rows = [name for name, one in application.feeds().items() if one.by_sample]  # the model checks the others
    _check_shapes([known[name] for name in rows if name in batch], batch, required)
    return batch


def _required(application: Application) -> set[str]:
    """Inputs without a default in forward. A Transformer computes the positions of its words if they are missing."""
    parameters = inspect.signature(type(application).forward).parameters
    return {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}


def _tensor(variable: Variable, value: Any, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        value = _from_numpy(variable.name, value)
    if value.is_floating_point() != variable.dtype.is_floating_point and value.dtype is not torch.bool:
        raise UsageError(f"feed[{variable.name!r}] holds {value.dtype}, but the program takes {variable.dtype}")
    return value.to(device, variable.dtype)


def _from_numpy(name: str, value: Any) -> Tensor:
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists with rows of different lengths
        raise UsageError(f"feed[{name!r}] cannot be converted to an array: {error}") from None
    if array.dtype.kind not in "fiub":
        raise UsageError(f"feed[{name!r}] holds {array.dtype}: must hold real numbers")
    try:
        return torch.from_numpy(np.ascontiguousarray(array))
    except (TypeError, ValueError):  # another byte order, or wider than any type of torch
        kind = "float64" if array.dtype.kind == "f" else "int64"
        raise UsageError(
            f"feed[{name!r}] holds {array.dtype.str}, which torch does not support: feed array.astype('{kind}')"
        ) from None


def _check_shapes(variables: list[Variable], batch: Mapping[str, Tensor], required: set[str]) -> None:
    """Check shapes, so that a wrong one is not silently reshaped. A leading -1 means one row per sample."""
    rows = {v.name: len(batch[v.name]) for v in variables if v.shape[:1] == (-1,) and batch[v.name].dim()}
    first = next(iter(rows), "")
    for variable in variables:
        name, shape = variable.name, tuple(batch[variable.name].shape)
        broadcast = name not in required  # optional inputs are added to something and may be broadcast
        if not _fits(shape, variable.shape, broadcast=broadcast):
            raise UsageError(f"feed[{name!r}] has the shape {shape}, but the program takes {variable.shape}")
        if name in rows and rows[name] != rows[first] and not (broadcast and rows[name] == 1):
            raise UsageError(f"feed[{name!r}] has {rows[name]} rows, but feed[{first!r}] has {rows[first]}")


def _fits(shape: tuple[int, ...], expected: tuple[int, ...], *, broadcast: bool) -> bool:
    """-1 is any size; trailing dimensions of 1 may be missing or added."""
    while expected and expected[-1] == 1:
        expected = expected[:-1]
    pairs = zip(shape, expected, strict=False)
    sizes = all(size in (-1, actual) or (broadcast and actual == 1) for actual, size in pairs)
    return len(shape) >= len(expected) and sizes and all(rest == 1 for rest in shape[len(expected) :])
