"""Outputs of a run as numpy arrays; parameters by Paddle's or torch's names, also through the scope."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fleetx.applications import Application
from fleetx.applications.not_covered import not_covered_by
from fleetx.errors import UsageError
from fleetx.optim import parameter_names
from fleetx.paddle.static import programs, training


class ScalarArray(np.ndarray):
    """An array of one number, like the scalars of Paddle's programs; old scripts print it with %f."""

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __repr__(self) -> str:
        return repr(np.asarray(self))


def as_numpy(tensor: Tensor) -> np.ndarray:
    """Return a copy, which later steps do not change. bfloat16 becomes float32, because numpy has no bfloat16."""
    plain = tensor.detach().to("cpu", torch.float32 if tensor.dtype is torch.bfloat16 else None)
    array: np.ndarray = plain.numpy().copy()
    return array if array.ndim else array.reshape(1).view(ScalarArray)


def full_value(application: Application, name: str) -> Tensor:
    """Return the value of a parameter. If it is sharded, every worker must call this."""
    parameter, transposed = _local(application, name)
    value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.data
    return value.detach().t() if transposed else value.detach()


def _local(application: Application, name: str) -> tuple[nn.Parameter, bool]:
    parameter, transposed = training.parameter(application, name)
    if parameter.is_meta:
        raise UsageError(f"{name} belongs to another stage of the pipeline, not to this worker")
    return parameter, transposed


class ParameterTensor:
    """A view of a parameter. The weight of a Linear is (in, out) under its Paddle name, (out, in) under torch's."""

    def __init__(self, application: Application, name: str):
        self._application, self._name = application, name
        training.parameter(application, name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if isinstance(_local(self._application, self._name)[0], DTensor):
            # A gather by one worker would collide with the next step of the others.
            raise UsageError(
                f"{self._name} is sharded, and gathering it needs all workers: fetch it on every worker, with "
                f"fetch_list=[{self._name!r}] when you run the program"
            )
        return np.asarray(as_numpy(full_value(self._application, self._name)), dtype=dtype)

    def shape(self) -> list[int]:
        parameter, transposed = training.parameter(self._application, self._name)
        return list(reversed(parameter.shape)) if transposed else list(parameter.shape)

    def set(self, array: Any, place: Any = None) -> None:
        """Overwrite the parameter. Every worker must set the same value."""
        parameter, transposed = training.parameter(self._application, self._name)
        if parameter.is_meta or isinstance(parameter, DTensor):
            raise UsageError(
                f"this worker holds only a part of {self._name}: set parameters before you run the startup program"
            )
        new = torch.from_numpy(np.ascontiguousarray(array))
        new = new.t() if transposed else new
        if new.shape != parameter.shape:
            raise UsageError(f"{self._name} has the shape {tuple(self.shape())}, but the array has {np.shape(array)}")
        with torch.no_grad():
            parameter.copy_(new)


# --- Paddle's scope: the parameters of the applications in use, or else of the one created last ------
@dataclass(frozen=True)
class ScopeVariable:
    name: str
    application: Application

    def get_tensor(self) -> ParameterTensor:
        """Return a view: np.array(view) reads the parameter, view.set(array, place) overwrites it."""
        return ParameterTensor(self.application, self.name)


class Scope:
    def var(self, name: str) -> ScopeVariable:
        """Like find_var, but an unknown name is an error. Paddle creates a variable, which nothing here would read."""
        variable = self.find_var(name)
        if variable is None:
            programs.last_application().main_prog.variable(name)  # raises an error that suggests a known name
            raise UsageError(f"{name!r} has a value only while the program runs: fetch it with fetch_list=[{name!r}]")
        return variable

    def find_var(self, name: str) -> ScopeVariable | None:
        """Return None if there is no such parameter."""
        if len(_owners(name)) > 1:
            gc.collect()  # drops models that only a reference cycle keeps alive
        owners = _owners(name)
        if len(owners) > 1:
            kinds = " and ".join(type(owner).__name__ for owner in owners)
            raise UsageError(
                f"{len(owners)} models in use have a parameter {name!r}, {kinds}: fetch it with "
                f"fetch_list=[{name!r}] when you run the program of the model that you mean"
            )
        return ScopeVariable(name, owners[0]) if owners else None

    __getattr__ = not_covered_by("paddle.static.Scope", ("var", "find_var"))


def _owners(name: str) -> list[Application]:
    return _with_parameter(name, programs.in_use()) or _with_parameter(name, [programs.last_application()])


def _with_parameter(name: str, applications: list[Application]) -> list[Application]:
    return [one for one in applications if any(name in names for names in parameter_names.names(one).values())]


_global = Scope()


def global_scope() -> Scope:
    return _global
