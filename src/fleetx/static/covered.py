"""What is said where a script asks for a name of Paddle that fleetx does not cover."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_HOME = "fleetx.static.paddle"

_INSTEAD = {
    "paddle.fluid.layers": "layers of a model are torch's: make a model of fleetx.applications, or a torch.nn.Module",
    "paddle.nn": "layers of a model are torch's: make a model of fleetx.applications, or a torch.nn.Module",
    "paddle.fluid.io": "save with model.save_params(folder) or fleet.save(folder)",
    "paddle.static.save": "save with model.save_params(folder) or fleet.save(folder)",
    "paddle.fluid.CompiledProgram": "there is no graph to compile: run the program itself",
    "paddle.static.CompiledProgram": "there is no graph to compile: run the program itself",
    "paddle.disable_static": "this is Paddle's static style alone; for eager training use PyTorch and fleetx.fleet",
}


def not_covered(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module."""

    def __getattr__(name: str) -> NoReturn:  # noqa: N807
        if name.startswith("__"):  # Python asks for these by itself
            raise AttributeError(name)
        raise AttributeError(sentence(module, name))

    return __getattr__


def not_covered_by(owner: str, known: Sequence[str]) -> Callable[[Any, str], Any]:
    """The `__getattr__` of a class."""

    def __getattr__(self: Any, name: str) -> NoReturn:  # noqa: N807
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(_sentence(owner, name, known))

    return __getattr__


def shown(module: str) -> str:
    return "paddle" + module.removeprefix(_HOME)


def sentence(module: str, name: str) -> str:
    return _sentence(shown(module), name, sys.modules[module].__all__)


def _sentence(owner: str, name: str, known: Sequence[str]) -> str:
    wanted, near = f"{owner}.{name}", difflib.get_close_matches(name, known, n=1)
    reason = next((_INSTEAD[part] for part in (wanted, owner) if part in _INSTEAD), "")
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"fleetx does not cover {wanted}: {hint}{reason + '. ' if reason else ''}{owner} has {', '.join(known)}"
