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
    if missing := [name for name in known if name not in feed and _needed(application, name)]:
        raise UsageError(f"feed lacks {', '.join(missing)} of the inputs of {type(application).__name__}")
    device = next((p.device for p in application.parameters() if not p.is_meta), torch.device("cpu"))
    return {name: _tensor(known[name], feed[name], device) for name in known if name in feed}


def _needed(application: Application, name: str) -> bool:
    """Has forward no default for it? A Transformer finds the places of its words by itself."""
    return inspect.signature(type(application).forward).parameters[name].default is inspect.Parameter.empty


def _tensor(variable: Variable, value: Any, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        if not isinstance(value, np.ndarray):
            value = np.asarray(value)
        if value.dtype.kind not in "fiub":
            raise UsageError(f"feed[{variable.name!r}] holds {value.dtype}, which is no kind of number")
        value = torch.from_numpy(np.ascontiguousarray(value))
    if value.is_floating_point() != variable.dtype.is_floating_point and value.dtype is not torch.bool:
        raise UsageError(f"feed[{variable.name!r}] holds {value.dtype}, and the program takes {variable.dtype}")
    return value.to(device, variable.dtype)
