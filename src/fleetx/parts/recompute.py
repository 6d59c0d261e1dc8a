from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from fleetx.errors import UsageError
from fleetx.forwards import Layer, has_forward, wrap
from fleetx.moment import Moment
from fleetx.part import Names, Part, settings
from fleetx.stage import Stage, at
from fleetx.structure import named_modules
from fleetx.world import World


@settings
class Recompute(Part):
    """Keep only the input of the named modules; compute their inside again when backward needs it.

    Random state is replayed, so dropout draws the same mask; buffers that the first pass changed (BatchNorm's
    statistics) are shielded from the second, so they are updated once (pytorch issue 96136).
    Neutral: gradients equal those without it, bit for bit. Reference: Chen et al. 2016, arXiv 1604.06174.
    """

    checkpoints: Names = Field(default_factory=list)
    """Names of modules, as in `model.named_modules()`; patterns, level by level, such as `encoder.layer.*`."""
    enable_offload: bool = False
    """Move what is kept to host memory."""
    checkpoint_shape: list[int] = Field(default_factory=list)
    """The shape of what is kept, which Paddle's static memory plan asks for."""

    no_meaning: ClassVar[dict[str, str]] = {"checkpoint_shape": "shapes are seen when the model runs"}
    neutral: ClassVar[dict[str, list[str]]] = {"checkpoints": ["*"]}
    costs: ClassVar[str] = "time: a second forward of the named modules; memory: their inside is not kept"

    def problems(self) -> Iterator[str]:
        if not self.checkpoints:
            yield "checkpoints is empty, so nothing would be recomputed: name modules, or turn recompute off"
        if self.enable_offload:
            yield "enable_offload = True: not available yet"

    def misfits(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        modules = dict(named_modules(model))
        for pattern in self.checkpoints:
            found = _matches(pattern, modules)
            if not found:
                near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.4)
                hint = (
                    f": did you mean {', '.join(near)}?" if near else f". The first are {', '.join(list(modules)[:5])}"
                )
                yield f"recompute_configs['checkpoints']: the model has no module {pattern!r}{hint}"
            elif bare := [n for n in found if not has_forward(modules[n])]:
                yield (
                    f"recompute_configs['checkpoints']: {bare[0]!r} has no forward of its own, so nothing would be "
                    f"recomputed: write '{bare[0]}.*'"
                )

    @at(Stage.MODEL)
    def segment(self, model: nn.Module, moment: Moment) -> nn.Module:
        """make the named modules keep their input alone, and run again during backward"""
        modules = dict(named_modules(model))
        for name in sorted({n for pattern in self.checkpoints for n in _matches(pattern, modules)}):
            wrap(modules[name], Layer.REPLAY, _Segment(moment.forward))
        return model


def _matches(pattern: str, names: Iterable[str]) -> list[str]:
    """Level by level: `blocks.*` means the blocks, not what is inside of them too."""
    return [n for n in names if n == pattern or _fits(n.split("."), pattern.split("."))]


def _fits(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatch.fnmatchcase, name, pattern))


class _Segment:
    """Around a module: run it, forget its inside, and run it again during backward."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]):
        self.context = context
        self.changing: set[str] | None = None  # buffers that a forward changes; not known before the first
        self._inside: list[tuple[str, nn.Module]] = []  # the modules in the segment

    def __call__(self, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        shield = _Shield(self, module)
        args, kwargs = tuple(map(_no_cache, args)), {k: _no_cache(v) for k, v in kwargs.items()}
        return checkpoint(inner, *args, use_reentrant=False, context_fn=lambda: (shield.watch(), shield), **kwargs)

    def buffers(self, module: nn.Module) -> dict[str, Tensor]:
        """Like `named_buffers`, without a walk over the modules in every forward."""
        self._inside = self._inside or list(module.named_modules())
        found = ((f"{name}.{k}" if name else k, b) for name, m in self._inside for k, b in m._buffers.items())
        return {name: b for name, b in found if b is not None}


class _Shield:
    """Gives the second pass the buffers as the first one found them, and lets it change only copies of them."""

    def __init__(self, segment: _Segment, module: nn.Module):
        self._segment, self._module = segment, module
        self._found: dict[str, Tensor] = {}  # the values before the first pass, of those that it changes
        self._kept: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._stack = ExitStack()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around the first pass."""
        before = self._segment.buffers(self._module)
        watched = before if self._segment.changing is None else {k: before[k] for k in self._segment.changing}
        values = {name: b.clone() for name, b in watched.items()}  # all of them once, then only those that change
        state = {name: (id(b), b._version) for name, b in before.items()}
        yield
        after = self._segment.buffers(self._module)
        owners = {n.rpartition(".")[0] for n, b in after.items() if (id(b), b._version) != state.get(n)}
        # BatchNorm writes its statistics without a new version, but counts its batches with one: take them together.
        changed = {n for n in before if n.rpartition(".")[0] in owners}
        self._segment.changing = (self._segment.changing or set()) | changed
        self._found = {n: values.get(n, after.get(n, before[n])) for n in changed}

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(self._segment.context())
        owners = {owner: self._module.get_submodule(owner) for owner in {n.rpartition(".")[0] for n in self._found}}
        self._kept = [(m, dict(m._buffers)) for m in owners.values()]
        for name, value in self._found.items():
            owner, _, key = name.rpartition(".")
            owners[owner]._buffers[key] = value.clone()

    def __exit__(self, *error: Any) -> None:
        for module, buffers in self._kept:
            module._buffers.update(buffers)
        self._stack.__exit__(*error)


def _no_cache(value: Any) -> Any:
    """Leave out the key-value cache of a transformers model: a second pass would append to it again."""
    if not any(c.__name__ == "Cache" and c.__module__.startswith("transformers.") for c in type(value).__mro__):
        return value
    if value.get_seq_length() > 0:
        raise UsageError("recompute cannot run again what reads a filled cache: pass no past_key_values while training")
    return None
