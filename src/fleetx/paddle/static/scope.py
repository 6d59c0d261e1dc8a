"""Paddle's scope: parameters by name, of the applications that are in use, or else of the one that was made last."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from fleetx.applications import Application
from fleetx.applications.not_covered import not_covered_by
from fleetx.errors import UsageError
from fleetx.optim import parameter_names
from fleetx.paddle.static import programs
from fleetx.paddle.static.values import Held


@dataclass(frozen=True)
class ScopeVariable:
    name: str
    application: Application

    def get_tensor(self) -> Held:
        """np.array(...) of it is the value; set(array, place) overwrites it."""
        return Held(self.application, self.name)


class Scope:
    def var(self, name: str) -> ScopeVariable:
        """Unlike Paddle's, it makes no new variable where a name is unknown: nothing would ever read it."""
        found = self.find_var(name)
        if found is None:
            programs.last_application().main_prog.variable(name)  # which knows what is near
            raise UsageError(f"{name!r} has a value only while the program runs: fetch it with fetch_list=[{name!r}]")
        return found

    def find_var(self, name: str) -> ScopeVariable | None:
        """None where there is no such parameter."""
        if len(_owners(name)) > 1:
            gc.collect()  # models of the past, which only a cycle keeps alive
        owners = _owners(name)
        if len(owners) > 1:
            kinds = " and ".join(type(owner).__name__ for owner in owners)
            raise UsageError(
                f"{len(owners)} models are in use that have a parameter {name!r}, {kinds}: fetch it with "
                f"fetch_list=[{name!r}] in a run of the program that is meant"
            )
        return ScopeVariable(name, owners[0]) if owners else None

    __getattr__ = not_covered_by("paddle.static.Scope", ("var", "find_var"))


def _owners(name: str) -> list[Application]:
    return _having(name, programs.in_use()) or _having(name, [programs.last_application()])


def _having(name: str, applications: list[Application]) -> list[Application]:
    return [one for one in applications if any(name in all_names for all_names in parameter_names.names(one).values())]


_global = Scope()


def global_scope() -> Scope:
    return _global
