"""What comes out of a run, as numpy has it; and parameters, by either of their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fleetx.applications import Application
from fleetx.errors import UsageError
from fleetx.paddle.static import training


class One(np.ndarray):
    """An array of one number, which the scalars of Paddle's programs are; old scripts print it with %f."""

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __repr__(self) -> str:
        return repr(np.asarray(self))


def as_numpy(tensor: Tensor) -> np.ndarray:
    """A copy: what is trained afterwards does not change it."""
    plain = tensor.detach().to("cpu", torch.float32 if tensor.dtype in _ONLY_IN_TORCH else None)
    found: np.ndarray = plain.numpy().copy()
    return found if found.ndim else found.reshape(1).view(One)


_ONLY_IN_TORCH = (torch.bfloat16,)


def whole(application: Application, name: str) -> Tensor:
    """The value of a parameter. Where it is divided by sharding, every worker must ask."""
    parameter, turned = _held(application, name)
    found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.data
    return found.detach().t() if turned else found.detach()


def _held(application: Application, name: str) -> tuple[nn.Parameter, bool]:
    parameter, turned = training.parameter(application, name)
    if parameter.is_meta:
        raise UsageError(f"{name} is held by another stage of the pipeline, not by this worker")
    return parameter, turned


class Held:
    """A parameter of an application. Of a Linear's weight the Paddle name gives (in, out), and torch's (out, in)."""

    def __init__(self, application: Application, name: str):
        self._application, self._name = application, name
        training.parameter(application, name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if isinstance(_held(self._application, self._name)[0], DTensor):
            # A worker that reads it alone would meet the others in the middle of their next step.
            raise UsageError(
                f"each worker holds a part of {self._name}, which all must bring together: fetch it on every worker, "
                f"with fetch_list=[{self._name!r}] in a run of the program"
            )
        return np.asarray(as_numpy(whole(self._application, self._name)), dtype=dtype)

    def shape(self) -> list[int]:
        parameter, turned = training.parameter(self._application, self._name)
        return list(reversed(parameter.shape)) if turned else list(parameter.shape)

    def set(self, array: Any, place: Any = None) -> None:
        """Overwrite it. Every worker must set the same."""
        parameter, turned = training.parameter(self._application, self._name)
        if parameter.is_meta or isinstance(parameter, DTensor):
            raise UsageError(f"this worker holds only a part of {self._name}: set parameters before the startup run")
        new = torch.from_numpy(np.ascontiguousarray(array))
        new = new.t() if turned else new
        if new.shape != parameter.shape:
            raise UsageError(
                f"{self._name} has the shape {tuple(self.shape())}, and an array of {np.shape(array)} was given"
            )
        with torch.no_grad():
            parameter.copy_(new)
