"""What a run is fed with: arrays or tensors by the names of the program's inputs."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetx.applications import Application, Variable
from fleetx.errors import UsageError


def tensors(application: Application, feed: Any) -> dict[str, Tensor]:
    """The batch for the application, on its device; `feed` is a dict, or a list with one."""
    if isinstance(feed, list | tuple) and len(feed) == 1:
        feed = feed[0]
    if not isinstance(feed, Mapping):
        many = f"a list of {len(feed)}" if isinstance(feed, list | tuple) else repr(feed)
        raise UsageError(f"feed must be a dict of arrays by name, or a list with one such dict, not {many}")
    known = {variable.name: variable for variable in application.inputs}
    for name in feed:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its inputs are {', '.join(known)}"
            raise UsageError(f"{type(application).__name__} has no input {name!r}: {hint}")
    needed = _needed(application)
    if missing := [name for name in known if name not in feed and name in needed]:
        raise UsageError(f"feed lacks {', '.join(missing)} of the inputs of {type(application).__name__}")
    device = next((p.device for p in application.parameters() if not p.is_meta), torch.device("cpu"))
    made = {name: _tensor(known[name], feed[name], device) for name in known if name in feed}
    rows = [name for name, one in application.feeds().items() if one.by_sample]  # others the model checks itself
    _check_shapes([known[name] for name in rows if name in made], made, needed)
    return made


def _needed(application: Application) -> set[str]:
    """The inputs that forward has no default for. A Transformer finds the places of its words by itself."""
    parameters = inspect.signature(type(application).forward).parameters
    return {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}


def _tensor(variable: Variable, value: Any, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        value = _from_numpy(variable.name, value)
    if value.is_floating_point() != variable.dtype.is_floating_point and value.dtype is not torch.bool:
        raise UsageError(f"feed[{variable.name!r}] holds {value.dtype}, and the program takes {variable.dtype}")
    return value.to(device, variable.dtype)


def _from_numpy(name: str, value: Any) -> Tensor:
    try:
        array = np.asarray(value)
    except ValueError as error:  # of lists with rows of different lengths
        raise UsageError(f"feed[{name!r}] cannot be made an array: {error}") from None
    if array.dtype.kind not in "fiub":
        raise UsageError(f"feed[{name!r}] holds {array.dtype}, which is no kind of number")
    try:
        return torch.from_numpy(np.ascontiguousarray(array))
    except (TypeError, ValueError):  # in the other order of bytes, or wider than any type of torch
        kind = "float64" if array.dtype.kind == "f" else "int64"
        raise UsageError(
            f"feed[{name!r}] holds {array.dtype.str}, which torch has no type for: feed array.astype('{kind}')"
        ) from None


def _check_shapes(variables: list[Variable], made: Mapping[str, Tensor], needed: set[str]) -> None:
    """A wrong shape must not become a right one of as many numbers; what begins with -1 has one row for each sample."""
    rows = {v.name: len(made[v.name]) for v in variables if v.shape[:1] == (-1,) and made[v.name].dim()}
    first = next(iter(rows), "")
    for variable in variables:
        name, have = variable.name, tuple(made[variable.name].shape)
        stretched = name not in needed  # what may be left out is added to something, to which it may be broadcast
        if not _fits(have, variable.shape, stretched=stretched):
            raise UsageError(f"feed[{name!r}] has the shape {have}, and the program takes {variable.shape}")
        if name in rows and rows[name] != rows[first] and not (stretched and rows[name] == 1):
            raise UsageError(f"feed[{name!r}] has {rows[name]} rows, and feed[{first!r}] has {rows[first]}")


def _fits(have: tuple[int, ...], want: tuple[int, ...], *, stretched: bool) -> bool:
    """-1 is any size; dimensions of 1 at the end may be left out or added."""
    while want and want[-1] == 1:
        want = want[:-1]
    sizes = all(size in (-1, found) or (stretched and found == 1) for found, size in zip(have, want, strict=False))
    return len(have) >= len(want) and sizes and all(rest == 1 for rest in have[len(want) :])
