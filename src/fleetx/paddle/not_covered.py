"""Errors for names in Paddle's modules that fleetx does not support."""

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
    """The name of a module as the script knows it: fleet was paddle.fleet before it was paddle.distributed.fleet."""
    name = module.removeprefix(_HOME)
    if (name == ".fleet" or name.startswith(".fleet.")) and "paddle.fleet" not in sys.modules:
        name = f".distributed{name}"
    return f"paddle{name}"


def sentence(module: str, name: str) -> str:
    owner = shown(module)
    return objects.sentence(owner, name, sys.modules[module].__all__, of_module=objects.INSTEAD.get(owner, ""))
