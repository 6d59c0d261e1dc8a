"""`import paddle` gives fleetx.paddle.api: the same module under both names, so that there is one state."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing import spawn
from types import ModuleType
from typing import Any, NoReturn

from fleetx.errors import UsageError

HOME = "fleetx.paddle.api"

# The first match counts, so longer names come first.
_ALIASES = {
    "paddle.fluid.incubate.fleet.base": "fleetx.fleet.base",
    "paddle.distributed.fleet.base": "fleetx.fleet.base",
    "paddle.fleet.base": "fleetx.fleet.base",
    "paddle.distributed.fleet": f"{HOME}.fleet",
    "paddle": HOME,
    "fleet_lightning": "fleetx",  # FleetX's former name
}


def install() -> Finder:
    """Make `import paddle` and `import fleet_lightning` give fleetx, in spawned processes too."""
    loaded = sys.modules.get("paddle")
    if loaded is not None and loaded.__name__ != HOME:
        raise UsageError("Paddle is already imported: call fleetx.static.install() before `import paddle`")
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
        spawn.get_preparation_data = _preparation_data
    return _finder


class Finder(MetaPathFinder):
    announced = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{HOME}."):
            # `__getattr__` alone is not enough: `from paddle.fluid import x` would drop its message.
            if PathFinder.find_spec(fullname, path) is None:
                raise ModuleNotFoundError(_sentence(*fullname.rsplit(".", 1)), name=_shown(fullname))
            return None
        if fullname == "fleetx.dataset":
            from fleetx.applications.not_covered import of_fleetx

            raise ModuleNotFoundError(of_fleetx("fleetx", "dataset", ()), name=fullname)
        alias = next((name for name in _ALIASES if fullname == name or fullname.startswith(f"{name}.")), None)
        if alias is None:
            return None
        return ModuleSpec(fullname, _AliasLoader(_ALIASES[alias] + fullname.removeprefix(alias), self))

    def announce(self, name: str) -> None:
        if not self.announced and os.environ.get("RANK", os.environ.get("PADDLE_TRAINER_ID", "0")) == "0":
            print(f"fleetx: `import {name}` gives fleetx: this script trains on PyTorch", file=sys.stderr, flush=True)
        self.announced = True


class _AliasLoader(Loader):
    """Loads a module by returning another."""

    def __init__(self, real: str, finder: Finder):
        self._real, self._finder = real, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._finder.announce(spec.name.partition(".")[0])
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has just replaced it
        if self._real.startswith(HOME) and not hasattr(module, "__path__"):
            module.__path__ = []  # makes it a package, so that the finder is asked for its submodules


# --- names that fleetx does not support ----------------------------------------------------------
def not_covered(module: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module."""

    def __getattr__(name: str) -> NoReturn:  # noqa: N807
        if name.startswith("__"):  # Python looks these up itself
            raise AttributeError(name)
        raise AttributeError(_sentence(module, name))

    return __getattr__


def _sentence(module: str, name: str) -> str:
    from fleetx.applications import not_covered as objects  # imported late, because it loads torch

    owner = _shown(module)
    return objects.sentence(owner, name, sys.modules[module].__all__, of_module=objects.INSTEAD.get(owner, ""))


def _shown(module: str) -> str:
    """The name of a module as the script knows it: fleet was paddle.fleet before it was paddle.distributed.fleet."""
    name = module.removeprefix(HOME)
    if (name == ".fleet" or name.startswith(".fleet.")) and "paddle.fleet" not in sys.modules:
        name = f".distributed{name}"
    return f"paddle{name}"


# --- spawned processes ----------------------------------------------------------------------------
class _Install:
    """Installs when it is unpickled, before a spawned process runs the script again for its definitions."""

    def __reduce__(self) -> Any:
        return _install_again, ()


def _install_again() -> None:
    install().announced = True  # the parent process has announced it


_get_preparation_data = spawn.get_preparation_data


def _preparation_data(name: str) -> dict[str, Any]:
    return {**_get_preparation_data(name), "fleetx": _Install()}


_finder = Finder()
