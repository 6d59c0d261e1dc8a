"""Shields buffers from the second pass, so that BatchNorm updates its statistics only once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fleetx.base import seams
from fleetx.base.seams import FakeTensor


class Buffers:
    """The buffers of one module; learns which of them a forward changes."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._changing: dict[bool, set[str]] = {}  # by module.training; unknown before the first such forward
        self._modules: list[tuple[str, nn.Module]] = []
        self._parameters: list[nn.Parameter] = []

    @contextmanager
    def watch(self, original: dict[str, Tensor]) -> Iterator[None]:
        """Around the first pass: store in `original` the earlier values of the buffers that it changes."""
        before, training = self._now(), self._module.training
        known = self._changing.get(training)
        watched = before if known is None else {k: before[k] for k in known if k in before}
        values = {name: b.clone() for name, b in watched.items()}  # all of them once, then only those that change
        state = {name: (id(b), seams.version(b)) for name, b in before.items()}
        yield
        after = self._now()
        new = {n for n, b in after.items() if (id(b), seams.version(b)) != state.get(n)}
        if known is None:  # batch norm writes its statistics without increasing their version
            new |= {n for n, value in values.items() if n in after and not _same(value, after[n])}
        owners = {n.rpartition(".")[0] for n in new}
        changed = {n for n in before if n.rpartition(".")[0] in owners}
        self._changing[training] = (known or set()) | changed
        original |= {n: values.get(n, after.get(n, before[n])) for n in changed | (known or set()) if n in before}

    @contextmanager
    def shielded(self, original: dict[str, Tensor]) -> Iterator[None]:
        """Around a later pass: it sees the buffers as the first pass did, and changes only copies."""
        owners = {owner: self._module.get_submodule(owner) for owner in {n.rpartition(".")[0] for n in original}}
        current = [(m, dict(seams.buffers(m))) for m in owners.values()]
        for name, value in original.items():
            owner, _, key = name.rpartition(".")
            seams.buffers(owners[owner])[key] = value.clone()
        try:
            yield
        finally:
            for module, buffers in current:
                seams.buffers(module).update(buffers)

    def versions(self) -> int:
        """Changes whenever a parameter is modified in place."""
        self._parameters = self._parameters or list(self._module.parameters())
        return sum(seams.version(p) for p in self._parameters)

    def _now(self) -> dict[str, Tensor]:
        """Like `named_buffers`, but without walking the modules in every forward."""
        self._modules = self._modules or list(self._module.named_modules())
        buffers = ((f"{name}.{k}" if name else k, b) for name, m in self._modules for k, b in seams.buffers(m).items())
        return {name: b for name, b in buffers if b is not None}


def _same(a: Tensor, b: Tensor) -> bool:
    fake = isinstance(a, FakeTensor) or isinstance(b, FakeTensor)
    return a.shape == b.shape and a.dtype is b.dtype and (fake or torch.equal(a, b))
