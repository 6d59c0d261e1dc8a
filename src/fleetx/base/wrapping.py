"""Wrap the forward of individual modules. Types and names stay the same, and copies of the model are not wrapped.

Several parts may wrap the same module, in any order: the layer decides which wrapper is the inner one.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

from torch import nn

from fleetx.base import seams

_AROUND = "_fleetx_around"  # on a wrapped module: [(layer, around)], innermost first


class _Layers(list[Any]):
    """The wrappers of a module. A copy or a pickle of the module has none: it is a plain module."""

    def __deepcopy__(self, memo: Any) -> _Layers:
        return _Layers()

    def __reduce__(self) -> Any:
        return _Layers, ()


Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Layer(IntEnum):
    """From inner to outer: recomputation must contain the precision it runs in."""

    MATHEMATICS = 0
    PRECISION = 1
    REPLAY = 2
    STAGE = 3


def wrap(module: nn.Module, layer: Layer, around: Around) -> Callable[[], None]:
    """Make `module(...)` call `around(module, inner, args, kwargs)`, where `inner` is the previous forward.

    Returns a function that removes this wrapper.
    """
    layers = module.__dict__.setdefault(_AROUND, _Layers())
    layers.append((layer, around))
    layers.sort(key=lambda pair: pair[0])
    if not _installed(module):
        _install(module)
    return functools.partial(_take_off, module, (layer, around))


def _take_off(module: nn.Module, pair: tuple[Layer, Around]) -> None:
    layers = module.__dict__[_AROUND]
    layers.remove(pair)
    if not layers:
        _restore(module)


def unwrap(modules: Iterable[nn.Module]) -> None:
    """Remove all wrappers from these modules."""
    for module in modules:
        if _AROUND in module.__dict__:
            _restore(module)


def _restore(module: nn.Module) -> None:
    del module.__dict__[_AROUND]
    if not _installed(module):
        return  # something else has patched it since
    before = module.__dict__.pop("forward").__func__.before
    if before is not None:
        module.forward = before


def _installed(module: nn.Module) -> bool:
    """Is our forward installed? A copy of a wrapped module also has it, but no wrappers for it to call."""
    return hasattr(getattr(module.__dict__.get("forward"), "__func__", None), "before")


def _install(module: nn.Module) -> None:
    before = module.__dict__.get("forward")  # someone else's patch
    bound = isinstance(before, types.MethodType) and before.__self__ is module
    plain = type(module).forward if before is None else before.__func__ if bound else before

    # Dynamo must not trace it: wrappers enter contexts and recompute.
    @seams.disable_dynamo
    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = functools.partial(plain, self) if before is None or bound else plain
        for _, around in self.__dict__.get(_AROUND, ()):
            call = functools.partial(_around, around, self, call)
        return call(*args, **kwargs)

    forward.before = before
    # A bound method: copying the model binds it to the copy, while a closure over `module` would run the original.
    module.forward = types.MethodType(forward, module)


def _around(around: Around, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return around(module, inner, args, kwargs)
