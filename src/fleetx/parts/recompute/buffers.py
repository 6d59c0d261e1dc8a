"""What a module changed in its first pass is kept from its second: BatchNorm updates its statistics once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fleetx.measure.tracker import is_fake


class Buffers:
    """Of one module, for as long as the model lives: knows which of them a forward changes."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._changing: dict[bool, set[str]] = {}  # in training, or not; not known before the first such forward
        self._inside: list[tuple[str, nn.Module]] = []
        self._parameters: list[nn.Parameter] = []

    @contextmanager
    def watch(self, found: dict[str, Tensor]) -> Iterator[None]:
        """Around the first pass: `found` gets the values from before it, of those that it changes."""
        before, training = self._now(), self._module.training
        known = self._changing.get(training)
        watched = before if known is None else {k: before[k] for k in known if k in before}
        values = {name: b.clone() for name, b in watched.items()}  # all of them once, then only those that change
        state = {name: (id(b), b._version) for name, b in before.items()}
        yield
        after = self._now()
        new = {n for n, b in after.items() if (id(b), b._version) != state.get(n)}
        if known is None:  # the statistics of a batch norm are written without a new version
            new |= {n for n, value in values.items() if n in after and not _same(value, after[n])}
        owners = {n.rpartition(".")[0] for n in new}
        changed = {n for n in before if n.rpartition(".")[0] in owners}
        self._changing[training] = (known or set()) | changed
        found |= {n: values.get(n, after.get(n, before[n])) for n in changed | (known or set()) if n in before}

    @contextmanager
    def shielded(self, found: dict[str, Tensor]) -> Iterator[None]:
        """Around a later pass: it sees the buffers as the first one did, and changes copies of them."""
        owners = {owner: self._module.get_submodule(owner) for owner in {n.rpartition(".")[0] for n in found}}
        kept = [(m, dict(m._buffers)) for m in owners.values()]
        for name, value in found.items():
            owner, _, key = name.rpartition(".")
            owners[owner]._buffers[key] = value.clone()
        try:
            yield
        finally:
            for module, buffers in kept:
                module._buffers.update(buffers)

    def versions(self) -> int:
        """Changes when a parameter is written to."""
        self._parameters = self._parameters or list(self._module.parameters())
        return sum(p._version for p in self._parameters)

    def _now(self) -> dict[str, Tensor]:
        """Like `named_buffers`, without a walk over the modules in every forward."""
        self._inside = self._inside or list(self._module.named_modules())
        found = ((f"{name}.{k}" if name else k, b) for name, m in self._inside for k, b in m._buffers.items())
        return {name: b for name, b in found if b is not None}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype is b.dtype and (is_fake(a) or is_fake(b) or torch.equal(a, b))
