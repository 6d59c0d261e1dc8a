"""Errors for Paddle names of objects that fleetx does not support; `paddle/not_covered.py` has those of modules.

Here and not in `paddle/`, because `Program` and `Variable` of an application use it and applications are above paddle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fleetx.base.suggest import did_you_mean

_LAYERS = "layers come from torch: use a model of fleetx.applications, or a torch.nn.Module"
_SAVE = "save with model.save_params(folder) or fleet.save(folder)"
_COMPILED = "there is no graph to compile: run the program itself"
_PROGRAMS = "programs belong to a model: use model.main_prog and model.startup_prog, or the default programs"
_SINGLY = (
    "gradients are clipped by their global norm, with GradientClipByGlobalNorm (ClipGradByGlobalNorm); under dgc, set "
    "strategy.dgc_configs = {'clip_norm': ...} to clip each compressed tensor on each worker"
)

INSTEAD = {
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
    "paddle.static.Program.random_seed": "call paddle.seed(number) before you create the model",
    "paddle.disable_static": "only Paddle's static style is supported; for eager training use PyTorch and fleetx.fleet",
}


def not_covered_by(owner: str, known: Sequence[str]) -> Callable[[Any, str], Any]:
    """Make the `__getattr__` of a class."""

    def __getattr__(self: Any, name: str) -> NoReturn:  # noqa: N807
        if name.startswith("__"):  # Python looks these up itself
            raise AttributeError(name)
        raise AttributeError(sentence(owner, name, known))

    return __getattr__


def set_once(owner: str, known: Sequence[str]) -> Callable[[Any, str, Any], None]:
    """Make the `__setattr__` of a dataclass whose fields cannot be changed."""

    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807
        if name not in self.__dataclass_fields__:
            raise AttributeError(sentence(owner, name, known))
        if name in self.__dict__:
            raise AttributeError(f"{owner}.{name} is read-only")
        self.__dict__[name] = value

    return __setattr__


def sentence(owner: str, name: str, known: Sequence[str], *, for_all: str = "") -> str:
    wanted = f"{owner}.{name}"
    hint, reason = did_you_mean(name, known), INSTEAD.get(wanted, for_all)
    return (
        f"fleetx does not support {wanted}: {hint + ' ' if hint else ''}{reason + '. ' if reason else ''}"
        f"{owner} has {', '.join(known)}"
    )
