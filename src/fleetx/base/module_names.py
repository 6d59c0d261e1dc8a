"""Modules and parameters by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator

from torch import nn

from fleetx.base import seams
from fleetx.base.suggest import did_you_mean
from fleetx.errors import NOT_BUILT


def plain_name(name: str) -> str:
    """A name without the prefix that torch.compile adds."""
    return name.replace(f"{seams.ORIGINAL}.", "").removesuffix(seams.ORIGINAL)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()` by plain names, each module once, without the model itself."""
    seen: set[str] = set()
    for name, module in model.named_modules():
        if (plain := plain_name(name)) and plain not in seen:
            seen.add(plain)
            yield plain, module


def sparse_modules(model: nn.Module) -> str:
    """Names of modules with sparse gradients, which most strategies cannot handle."""
    return ", ".join(repr(name) for name, module in named_modules(model) if getattr(module, "sparse", False) is True)


def sparse_problem(switch: str, model: nn.Module) -> Iterator[str]:
    """Why a strategy cannot exchange the gradients of this model; yields nothing if none is sparse."""
    if sparse := sparse_modules(model):
        yield f"{switch} with the sparse gradients of {sparse} {NOT_BUILT}: set sparse=False there"


def no_module(name: str, modules: Iterable[str], otherwise: str) -> str:
    """The error for a name that no module has. otherwise: what to do in a model without modules."""
    names = list(modules)
    first = f"the first modules are {', '.join(names[:5])}" if names else otherwise
    return f"the model has no module {name!r}: {did_you_mean(name, names, otherwise=first, most=3, cutoff=0.4)}"


def has_forward(module: nn.Module) -> bool:
    """False for a container such as ModuleList: naming it would have no effect."""
    return type(module).forward is not nn.Module.forward


def named(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The names that match any pattern, in the order of the model."""
    names = [name for name, _ in named_modules(model)]
    wanted = {n for pattern in patterns for n in matches(pattern, names)}
    return [name for name in names if name in wanted]


def matches(pattern: str, names: Iterable[str]) -> list[str]:
    """Match level by level: `blocks.*` means the blocks, not the modules inside them."""
    return [n for n in names if n == pattern or _fits(n.split("."), pattern.split("."))]


def _fits(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatch.fnmatchcase, name, pattern))
