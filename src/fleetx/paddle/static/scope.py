"""Paddle's scope: parameters by name, of the applications in use, or else of the one created last."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from fleetx.applications import Application
from fleetx.applications.not_covered import not_covered_by
from fleetx.errors import UsageError
from fleetx.optim import parameter_names
from fleetx.paddle.static import programs
from fleetx.paddle.static.values import ParameterTensor


@dataclass(frozen=True)
class ScopeVariable:
    name: str
    application: Application

    def get_tensor(self) -> ParameterTensor:
        """Return a view: np.array(view) reads the parameter, view.set(array, place) overwrites it."""
        return ParameterTensor(self.application, self.name)


class Scope:
    def var(self, name: str) -> ScopeVariable:
        """Like find_var, but an unknown name is an error. Paddle creates a variable, which nothing would ever read."""
        variable = self.find_var(name)
        if variable is None:
            programs.last_application().main_prog.variable(name)  # raises an error that suggests a known name
            raise UsageError(f"{name!r} has a value only while the program runs: fetch it with fetch_list=[{name!r}]")
        return variable

    def find_var(self, name: str) -> ScopeVariable | None:
        """Return None if there is no such parameter."""
        if len(_owners(name)) > 1:
            gc.collect()  # models that only a reference cycle keeps alive
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
