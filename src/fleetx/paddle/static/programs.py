"""Default programs, and the applications in use: those that were minimized or started."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import torch

from fleetx.applications.application import Application
from fleetx.applications.program import Program, check_seed
from fleetx.comm.session import current
from fleetx.errors import UsageError

if TYPE_CHECKING:
    from fleetx.paddle.static.regularization import ClipByGlobalNorm


@dataclass
class Script:
    """What a Paddle script has created and set; part of the session."""

    numbers: count[int] = field(default_factory=count)
    in_use: WeakValueDictionary[int, Application] = field(default_factory=WeakValueDictionary)
    # Kept alive: a script may hold only the name of the loss and still run the default programs.
    last_minimized: Application | None = None
    clip: ClipByGlobalNorm | None = None  # of set_gradient_clip
    static: bool = False  # has enable_static been called?


def script() -> Script:
    session = current()
    if session.script is None:
        session.script = Script()
    found: Script = session.script
    return found


def register(application: Application, *, minimized: bool) -> None:
    """Mark an application as in use."""
    mine = script()
    if not any(application is other for other in in_use()):
        mine.in_use[next(mine.numbers)] = application
    if minimized:
        mine.last_minimized = application


def in_use() -> list[Application]:
    """The applications in use that still exist, newest last."""
    return list(script().in_use.values())


def _newest() -> Application | None:
    """The application created last; if it no longer exists, the newest one in use."""
    last = current().application
    return (last() if last is not None else None) or next(reversed(in_use()), None)


def last_application() -> Application:
    if (application := _newest()) is None:
        raise UsageError("there is no program yet: create a model first, such as fleetx.applications.Resnet50()")
    return application


class PendingProgram:
    """A default program before the model is created. Scripts seed it, keep it, and run it once there is a model."""

    def __init__(self, kind: Literal["main", "startup"]):
        self.__dict__["kind"] = kind

    def bound(self) -> Program:
        return Program(last_application(), self.kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks these up itself
            raise AttributeError(name)
        return getattr(self.bound(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "random_seed" and _newest() is None:
            if seed := check_seed(value):
                torch.manual_seed(seed)  # the model draws its weights when it is created
            return
        setattr(self.bound(), name, value)


def bound(program: Any) -> Any:
    """Resolve a default program that the script requested before there was a model."""
    return program.bound() if isinstance(program, PendingProgram) else program


def default_main_program() -> Program | PendingProgram:
    return application.main_prog if (application := _newest()) else PendingProgram("main")


def default_startup_program() -> Program | PendingProgram:
    return application.startup_prog if (application := _newest()) else PendingProgram("startup")
