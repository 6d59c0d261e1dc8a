from __future__ import annotations

import difflib
import fnmatch
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from fleetx.moment import Moment
from fleetx.part import Names, Part, settings
from fleetx.stage import Stage, at
from fleetx.world import World


@settings
class Recompute(Part):
    """Keep only the input of the named modules; compute their inside again when backward needs it.

    Random state is replayed, so dropout draws the same mask; buffers that the first pass changed (BatchNorm's
    statistics) are shielded from the second, so they are updated once (pytorch issue 96136).
    Neutral: gradients equal those without it, bit for bit. Reference: Chen et al. 2016, arXiv 1604.06174.
    """

    checkpoints: Names = Field(default_factory=list)
    """Names of modules, as in `model.named_modules()`; shell patterns such as `encoder.layer.*` are allowed."""
    enable_offload: bool = False
    """Move what is kept to host memory."""
    checkpoint_shape: list[int] = Field(default_factory=list)
    """The shape of what is kept, which Paddle's static memory plan asks for."""

    no_meaning: ClassVar[dict[str, str]] = {"checkpoint_shape": "shapes are seen when the model runs"}
    costs: ClassVar[str] = "time: a second forward of the named modules; memory: their inside is not kept"

    def problems(self) -> Iterator[str]:
        if not self.checkpoints:
            yield "checkpoints is empty, so nothing would be recomputed: name modules, or turn recompute off"
        if self.enable_offload:
            yield "enable_offload = True: not available yet"

    def misfits(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        names = [name for name, _ in model.named_modules() if name]
        for pattern in self.checkpoints:
            if not _matches(pattern, names):
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
                hint = f": did you mean {', '.join(near)}?" if near else f". The first are {', '.join(names[:5])}"
                yield f"recompute_configs['checkpoints']: the model has no module {pattern!r}{hint}"

    @at(Stage.MODEL)
    def segment(self, model: nn.Module, moment: Moment) -> nn.Module:
        """make the named modules keep their input alone, and run again during backward"""
        modules = dict(model.named_modules())
        for name in sorted({n for pattern in self.checkpoints for n in _matches(pattern, list(modules))}):
            _recompute(modules[name], moment.forward)
        return model


def _matches(pattern: str, names: list[str]) -> list[str]:
    return [n for n in names if n and (n == pattern or fnmatch.fnmatchcase(n, pattern))]


def _recompute(module: nn.Module, context: Callable[[], Any]) -> None:
    """Replace the module's forward by one that is run again during backward."""
    plain = module.forward.__func__ if isinstance(module.forward, types.MethodType) else type(module).forward

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(plain, self)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        shield = _Shield(self)
        contexts = lambda: (shield.watch(), shield.replay(context))  # noqa: E731
        args, kwargs = tuple(map(_no_cache, args)), {k: _no_cache(v) for k, v in kwargs.items()}
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    # A bound method, because copying the model binds it to the copy; a closure over `module` would run the original.
    module.forward = types.MethodType(forward, module)


class _Shield:
    """Keeps the second pass from changing the buffers that the first one changed."""

    def __init__(self, module: nn.Module):
        self.owners = [m for m in module.modules() if m._buffers]
        self.changed: list[nn.Module] = []

    def _versions(self) -> list[list[int]]:
        return [[b._version for b in m._buffers.values() if b is not None] for m in self.owners]

    @contextmanager
    def watch(self) -> Iterator[None]:
        before = self._versions()
        yield
        self.changed = [m for m, a, b in zip(self.owners, before, self._versions(), strict=True) if a != b]

    @contextmanager
    def replay(self, context: Callable[[], Any]) -> Iterator[None]:
        kept = [dict(m._buffers) for m in self.changed]
        for m in self.changed:
            m._buffers.update({k: None if b is None else b.clone() for k, b in m._buffers.items()})
        try:
            with ExitStack() as stack:
                stack.enter_context(context())
                yield
        finally:
            for m, buffers in zip(self.changed, kept, strict=True):
                m._buffers.update(buffers)


def _no_cache(value: Any) -> Any:
    """Drop the key-value cache of a transformers model: a second pass would append to it again."""
    return None if any(c.__name__ == "Cache" for c in type(value).__mro__) else value
