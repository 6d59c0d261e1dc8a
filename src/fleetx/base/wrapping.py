"""Put something around the forward of single modules. Their types and names stay as they were; copies are plain.

Several parts may wrap the same module, in any order of set-up: the layer decides which one is inside.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import nn

_AROUND = "_fleetx_around"  # on a wrapped module: [(layer, around)], innermost first


class _Layers(list[Any]):
    """What is around a module. A copy or a pickle of the module has nothing around it: it is a plain module."""

    def __deepcopy__(self, memo: Any) -> _Layers:
        return _Layers()

    def __reduce__(self) -> Any:
        return _Layers, ()


Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Layer(IntEnum):
    """Inner to outer: what runs again must contain the precision it runs in."""

    MATHEMATICS = 0
    PRECISION = 1
    REPLAY = 2
    STAGE = 3


def wrap(module: nn.Module, layer: Layer, around: Around) -> Callable[[], None]:
    """From now on `module(...)` is `around(module, inner, args, kwargs)`, where `inner` is what it was before.

    What it returns takes this one off again.
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


def unwrap(model: nn.Module) -> None:
    """Take everything off again."""
    for module in model.modules():
        if _AROUND in module.__dict__:
            _restore(module)


def _restore(module: nn.Module) -> None:
    del module.__dict__[_AROUND]
    before = module.__dict__.pop("forward").__func__.before
    if before is not None:
        module.forward = before


def _installed(module: nn.Module) -> bool:
    """A copy of a wrapped module has nothing around it, and the forward that looks for it."""
    return hasattr(getattr(module.__dict__.get("forward"), "__func__", None), "before")


def _install(module: nn.Module) -> None:
    before = module.__dict__.get("forward")  # somebody else's patch
    plain = before.__func__ if isinstance(before, types.MethodType) else type(module).forward

    # Dynamo must not trace it: what is around a forward opens contexts and runs things again.
    @torch._disable_dynamo
    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = functools.partial(plain, self)
        for _, around in self.__dict__.get(_AROUND, ()):
            call = functools.partial(_around, around, self, call)
        return call(*args, **kwargs)

    forward.before = before  # type: ignore[attr-defined]
    # A bound method, because copying the model binds it to the copy; a closure over `module` would run the original.
    module.forward = types.MethodType(forward, module)


def _around(around: Around, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return around(module, inner, args, kwargs)
