"""The programs that there are: of applications that were described (by `minimize`) or started, and the default ones."""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

from fleetx.applications.application import Application
from fleetx.applications.program import Program
from fleetx.errors import UsageError

_numbers = count()
_in_use: WeakValueDictionary[int, Application] = WeakValueDictionary()
# A script may keep no more of a model than the name of its loss; its default programs are run all the same.
_described_last: Application | None = None


def note(application: Application, *, described: bool) -> None:
    """It is in use from now on."""
    global _described_last
    if not any(application is other for other in in_use()):
        _in_use[next(_numbers)] = application
    if described:
        _described_last = application


def in_use() -> list[Application]:
    """Those that are described or started and live, the newest last."""
    return list(_in_use.values())


def last_application() -> Application:
    """The one that was made last; where that is gone, the newest in use."""
    made = Application.last() if Application.last is not None else None
    living = [*in_use(), made] if made is not None else in_use()
    if not living:
        raise UsageError("there is no program yet: make an application first, such as fleetx.applications.Resnet50()")
    return living[-1]


def default_main_program() -> Program:
    return last_application().main_prog


def default_startup_program() -> Program:
    return last_application().startup_prog
