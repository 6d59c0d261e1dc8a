"""Default programs, and the applications in use: those that were minimized or started."""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

from fleetx.applications.application import Application
from fleetx.applications.program import Program
from fleetx.errors import UsageError

_numbers = count()
_in_use: WeakValueDictionary[int, Application] = WeakValueDictionary()
# Kept alive: a script may hold only the name of the loss and still run the default programs.
_last_minimized: Application | None = None


def register(application: Application, *, minimized: bool) -> None:
    """Mark an application as in use."""
    global _last_minimized
    if not any(application is other for other in in_use()):
        _in_use[next(_numbers)] = application
    if minimized:
        _last_minimized = application


def in_use() -> list[Application]:
    """The applications in use that still exist, newest last."""
    return list(_in_use.values())


def last_application() -> Application:
    """The application created last; if it no longer exists, the newest one in use."""
    created = Application.last() if Application.last is not None else None
    living = [*in_use(), created] if created is not None else in_use()
    if not living:
        raise UsageError("there is no program yet: create a model first, such as fleetx.applications.Resnet50()")
    return living[-1]


def default_main_program() -> Program:
    return last_application().main_prog


def default_startup_program() -> Program:
    return last_application().startup_prog
