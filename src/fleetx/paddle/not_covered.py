"""Errors for Paddle names of modules that fleetx does not support."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from fleetx.applications import not_covered as objects

_HOME = "fleetx.paddle.api"


def not_covered(module: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module."""

    def __getattr__(name: str) -> NoReturn:  # noqa: N807
        if name.startswith("__"):  # Python looks these up itself
            raise AttributeError(name)
        raise AttributeError(sentence(module, name))

    return __getattr__


def shown(module: str) -> str:
    return "paddle" + module.removeprefix(_HOME)


def sentence(module: str, name: str) -> str:
    owner = shown(module)
    return objects.sentence(owner, name, sys.modules[module].__all__, for_all=objects.INSTEAD.get(owner, ""))
