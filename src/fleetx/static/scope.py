"""Paddle's scope: the parameters of the application that was made last, by name."""

from __future__ import annotations

from dataclasses import dataclass

from fleetx import paddle_parameters
from fleetx.applications import Application, Parameter
from fleetx.errors import UsageError
from fleetx.static.programs import last_application
from fleetx.static.values import Held


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
        application = last_application()
        if not isinstance(application.main_prog.variable(name), Parameter):
            raise UsageError(f"{name!r} has a value only while the program runs: fetch it with fetch_list=[{name!r}]")
        return ScopeVariable(name, application)

    def find_var(self, name: str) -> ScopeVariable | None:
        """None where there is no such parameter."""
        known = paddle_parameters.names(last_application()).values()
        return self.var(name) if any(name in names for names in known) else None


_global = Scope()


def global_scope() -> Scope:
    return _global
