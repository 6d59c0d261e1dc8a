"""What is said where a script asks for a name of Paddle that fleetx does not cover, or sets one."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_HOME = "fleetx.paddle.api"

_LAYERS = "layers of a model are torch's: make a model of fleetx.applications, or a torch.nn.Module"
_SAVE = "save with model.save_params(folder) or fleet.save(folder)"
_COMPILED = "there is no graph to compile: run the program itself"
_PROGRAMS = "a program is that of a model: model.main_prog and model.startup_prog, or the default ones"
_SINGLY = (
    "gradients are clipped by their norm as a whole, with GradientClipByGlobalNorm (ClipGradByGlobalNorm); under dgc "
    "set strategy.dgc_configs = {'clip_norm': ...}, which clips each tensor that is compressed, on each worker"
)

_INSTEAD = {
    "paddle.fluid.layers": _LAYERS,
    "paddle.nn": _LAYERS,
    "paddle.nn.ClipGradByNorm": _SINGLY,
    "paddle.fluid.clip.GradientClipByNorm": _SINGLY,
    "paddle.fluid.io": _SAVE,
    "paddle.static.save": _SAVE,
    "paddle.fluid.CompiledProgram": _COMPILED,
    "paddle.static.CompiledProgram": _COMPILED,
    "paddle.fluid.Program": _PROGRAMS,
    "paddle.static.Program": _PROGRAMS,
    "paddle.fluid.program_guard": _PROGRAMS,
    "paddle.static.program_guard": _PROGRAMS,
    "paddle.static.Program.random_seed": "call paddle.seed(number) before the model is made, which has its weights now",
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


def set_once(owner: str, known: Sequence[str]) -> Callable[[Any, str, Any], None]:
    """The `__setattr__` of a dataclass that describes: its fields stay as they were made, others are not covered."""

    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807
        if name not in self.__dataclass_fields__:
            raise AttributeError(_sentence(owner, name, known))
        if name in self.__dict__:
            raise AttributeError(f"{owner}.{name} describes what there is, and cannot be changed")
        self.__dict__[name] = value

    return __setattr__


def shown(module: str) -> str:
    return "paddle" + module.removeprefix(_HOME)


def sentence(module: str, name: str) -> str:
    owner = shown(module)
    return _sentence(owner, name, sys.modules[module].__all__, of_all=_INSTEAD.get(owner, ""))


def _sentence(owner: str, name: str, known: Sequence[str], *, of_all: str = "") -> str:
    wanted, near = f"{owner}.{name}", difflib.get_close_matches(name, known, n=1)
    reason = _INSTEAD.get(wanted, of_all)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"fleetx does not cover {wanted}: {hint}{reason + '. ' if reason else ''}{owner} has {', '.join(known)}"
