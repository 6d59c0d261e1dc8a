"""Errors for Paddle names of objects that fleetx does not support; `paddle/not_covered.py` has those of modules.

Here and not in `paddle/`, because `Program` and `Variable` of an application use it and applications are above paddle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fleetx.base.suggest import did_you_mean

PAGE = "docs/coming_from_paddle.md"
# Whole messages, for what the page explains. The first hundred characters say what matters.
_LAYERS = (
    "fleetx runs Paddle scripts whose model is one of fleetx.applications, and has no {wanted}: build this in torch "
    f"and call fleet.distribute; see {PAGE}"
)
_SERVER = f"fleetx does not support parameter servers, which {{wanted}} is for: it trains collectively; see {PAGE}"
_EAGER = (
    "fleetx runs Paddle's static scripts only, not {wanted}: for eager training use PyTorch and fleet.distribute; "
    f"see {PAGE}"
)
WHOLE = {
    **dict.fromkeys(
        (
            "paddle.ParamAttr",
            "paddle.fluid.ParamAttr",
            "paddle.fluid.data",
            "paddle.fluid.initializer",
            "paddle.fluid.layers",
            "paddle.fluid.nets",
            "paddle.io",
            "paddle.nn",
            "paddle.static.data",
            "paddle.static.nn",
            "paddle.tensor",
            "paddle.vision",
        ),
        _LAYERS,
    ),
    **dict.fromkeys(
        (
            "paddle.distributed.fleet.init_server",
            "paddle.distributed.fleet.init_worker",
            "paddle.distributed.fleet.is_server",
            "paddle.distributed.fleet.run_server",
            "paddle.distributed.fleet.server_num",
            "paddle.distributed.fleet.stop_worker",
            "paddle.fluid.DistributeTranspiler",
            "paddle.fluid.incubate.fleet.parameter_server",
            "paddle.fluid.incubate.fleet.utils",
        ),
        _SERVER,
    ),
    **dict.fromkeys(
        ("paddle.DataParallel", "paddle.disable_static", "paddle.fluid.dygraph", "paddle.jit", "paddle.to_tensor"),
        _EAGER,
    ),
}
_SAVE = "save with model.save_params(folder) or fleet.save(folder)"
_COMPILED = "there is no graph to compile: run the program itself"
_PROGRAMS = "programs belong to a model: use model.main_prog and model.startup_prog, or the default programs"
_SINGLY = (
    "gradients are clipped by their global norm, with GradientClipByGlobalNorm (ClipGradByGlobalNorm); under dgc, set "
    "strategy.dgc_configs = {'clip_norm': ...} to clip each compressed tensor on each worker"
)

INSTEAD = {
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
    # A name of its own is not a misspelling of another.
    if (wanted in WHOLE or not (hint or reason)) and (whole := _whole(wanted)):
        return whole
    return (
        f"fleetx does not support {wanted}: {hint + ' ' if hint else ''}{reason + '. ' if reason else ''}"
        f"{owner} has {', '.join(known)}"
    )


def _whole(wanted: str) -> str:
    """The message for a name, or for what holds it."""
    plain = wanted.replace("paddle.fleet.", "paddle.distributed.fleet.")
    while plain:
        if plain in WHOLE:
            return WHOLE[plain].format(wanted=wanted)
        plain = plain.rpartition(".")[0]
    return ""
