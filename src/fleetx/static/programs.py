"""The default programs: those of the application that was made last."""

from __future__ import annotations

from fleetx.applications.application import Application
from fleetx.applications.program import Program
from fleetx.errors import UsageError


def last_application() -> Application:
    found = Application.last() if Application.last is not None else None
    if found is None:
        raise UsageError("there is no program yet: make an application first, such as fleetx.applications.Resnet50()")
    return found


def default_main_program() -> Program:
    return last_application().main_prog


def default_startup_program() -> Program:
    return last_application().startup_prog
