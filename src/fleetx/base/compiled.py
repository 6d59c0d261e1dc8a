"""Compiled libraries: plain C loaded with ctypes, optional at install. FLEETX_KERNELS turns them on or off."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

_KINDS: dict[str, Any] = {"n": ctypes.c_int64, "p": ctypes.c_void_p, "d": ctypes.c_double, "i": ctypes.c_int}
VERSION = 2  # of the functions and their arguments, in all libraries; fleetx_version() in C
_MISSING = (
    "the compiled kernels are not installed, because there was no working C compiler with OpenMP when fleetx was "
    "installed: install one, then fleetx again (pip install --no-cache-dir --force-reinstall --no-deps SOURCE, where "
    "SOURCE is what you installed it from)"
)


def asked_kernels() -> str | None:
    """What FLEETX_KERNELS asks for."""
    asked = os.environ.get("FLEETX_KERNELS") or None
    if asked not in (None, "foreach", "compiled", "triton"):
        raise ValueError(f"FLEETX_KERNELS={asked}: must be foreach, compiled or triton")
    return asked


class Library:
    """One compiled library: its path without `.so`, and the signature of each function in letters.

    n is an int64, p a pointer, d a double, i an int. The return type follows a colon; without one, it is an int.
    """

    def __init__(self, path: Path, **functions: str):
        self._path, self._functions = path, functions

    def available(self) -> bool:
        """Can it be used on this machine? FLEETX_KERNELS=foreach turns it off; =compiled raises an error if not."""
        return self.reason() == ""

    def reason(self) -> str:
        """Why it cannot be used, in a sentence; "" if it can."""
        asked = asked_kernels()
        if asked == "foreach":
            return "FLEETX_KERNELS=foreach turns the compiled kernels off"
        if isinstance(self._found, ctypes.CDLL):
            return ""
        if asked == "compiled":
            raise RuntimeError(f"FLEETX_KERNELS=compiled: {self._found}")
        return self._found

    def loaded(self) -> ctypes.CDLL:
        if isinstance(self._found, str):
            raise RuntimeError(self._found)
        return self._found

    @functools.cached_property
    def _found(self) -> ctypes.CDLL | str:
        """The library, or why there is none.

        The module that defines it imports torch first, so it shares torch's libgomp: a second libgomp would start a
        second thread pool on the same cores.
        """
        path = self._path.with_suffix(".so")
        if not path.exists():
            return _MISSING
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            return f"the compiled kernels are installed but cannot be loaded: {error}"
        if not hasattr(library, "fleetx_version") or library.fleetx_version() != VERSION:
            return f"{path.name} was built for a different version of fleetx: reinstall fleetx"
        for name, letters in self._functions.items():
            arguments, _, result = letters.partition(":")
            function = getattr(library, name)
            function.argtypes = [_KINDS[kind] for kind in arguments]
            function.restype = _KINDS[result or "i"]
        return library
