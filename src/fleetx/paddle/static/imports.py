"""`import paddle` finds fleetx.paddle.api: the very same module under both names, so that there is one state."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing import spawn
from types import ModuleType
from typing import Any

from fleetx.applications import not_covered
from fleetx.errors import UsageError

HOME = "fleetx.paddle.api"

# The longest name that fits decides.
_REAL = {
    "paddle.distributed.fleet.base": "fleetx.fleet.base",
    "paddle.fleet.base": "fleetx.fleet.base",
    "paddle.distributed.fleet": f"{HOME}.fleet",
    "paddle": HOME,
    "fleet_lightning": "fleetx",  # which it was called before
}


def install() -> Finder:
    """From here on `import paddle` and `import fleet_lightning` give fleetx; in processes that are spawned too."""
    loaded = sys.modules.get("paddle")
    if loaded is not None and loaded.__name__ != HOME:
        raise UsageError("paddle itself is loaded already: call fleetx.static.install() before it is imported")
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
        spawn.get_preparation_data = _sent_ahead
    return _finder


class Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.said = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{HOME}."):
            # Here and not in `__getattr__` alone: `from paddle.fluid import x` would drop what that says.
            if PathFinder.find_spec(fullname, path) is None:
                raise ModuleNotFoundError(
                    not_covered.sentence(*fullname.rsplit(".", 1)), name=not_covered.shown(fullname)
                )
            return None
        alias = next((name for name in _REAL if fullname == name or fullname.startswith(f"{name}.")), None)
        if alias is None:
            return None
        return ModuleSpec(fullname, _Alias(_REAL[alias] + fullname.removeprefix(alias), self))

    def say(self, name: str) -> None:
        if not self.said and os.environ.get("RANK", os.environ.get("PADDLE_TRAINER_ID", "0")) == "0":
            print(f"fleetx: `import {name}` gives fleetx: this script trains on PyTorch", file=sys.stderr, flush=True)
        self.said = True


class _Alias(Loader):
    """Loads a module by handing out another."""

    def __init__(self, real: str, finder: Finder):
        self._real, self._finder = real, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._finder.say(spec.name.partition(".")[0])
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has just written the other name there
        if self._real.startswith(HOME) and not hasattr(module, "__path__"):
            module.__path__ = []  # as if it had modules inside: then the finder is asked, and says what is covered


# --- processes that are spawned -------------------------------------------------------------------
class _Installed:
    """Installs where it is unpickled: before the script, which a spawned process reads again for its definitions."""

    def __reduce__(self) -> Any:
        return _install_again, ()


def _install_again() -> None:
    install().said = True  # by the process that spawned this one


_get_preparation_data = spawn.get_preparation_data


def _sent_ahead(name: str) -> dict[str, Any]:
    return {**_get_preparation_data(name), "fleetx": _Installed()}


_finder = Finder()
