"""The buffers of a model, which every rank copies from rank 0."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fleetx.base import seams
from fleetx.base.module_names import plain_name
from fleetx.base.trees import as_real
from fleetx.comm.world import World
from fleetx.errors import UsageError

WORTH = 2**20  # bytes of unchanged buffers that make it worth asking all ranks whether they changed
Key = tuple[str, str]  # the names of a module and of its buffer


class ModelBuffers:
    """Sends the buffers of rank 0 to all ranks. If they are large, sends only those that changed on some rank.

    Values are compared, because the version counter does not show a change through `.data` or in a BatchNorm kernel.
    A buffer that has changed once is always sent from then on: most such buffers change in every round.
    """

    def __init__(self, model: nn.Module):
        # Cheaper than traversing the model in every round.
        self._tables = [(path, seams.buffers(module)) for path, module in model.named_modules()]
        self._kept: dict[Key, Tensor] = {}  # copies of what was sent, for buffers that have not changed yet
        self._changing: set[Key] = set()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """On exit, the buffers are the same objects with the same values as on entry."""
        found = [(table, name, b) for _, table in self._tables for name, b in (table or {}).items()]
        values = [None if b is None or b.is_meta or b.layout is not torch.strided else b.clone() for _, _, b in found]
        try:
            yield
        finally:
            with torch.no_grad():
                for (table, name, b), before in zip(found, values, strict=True):
                    table[name] = b
                    if b is not None and before is not None and not torch.equal(b, before):
                        _once(b.detach()).copy_(_once(before))

    def send(self, world: World, *, skip: Collection[Tensor] = (), strict: bool = True) -> None:
        """A collective. skip: buffers to leave alone. strict: raise if one cannot be sent, instead of skipping it."""
        found = self._found({id(b) for b in skip}, strict) if world.size > 1 else {}
        if not found:
            return
        quiet = [key for key in found if key not in self._changing]
        large = sum(found[key].nbytes for key in quiet) >= WORTH
        known = [key for key in quiet if large and key in self._kept]
        unchanged = self._agree(known, found, world) if known else set()
        world.broadcast([b for key, b in found.items() if key not in unchanged])
        for key in quiet if large else ():
            if key not in self._kept and key not in self._changing:
                self._kept[key] = found[key].clone()

    def _found(self, skip: set[int], strict: bool) -> dict[Key, Tensor]:
        """The buffers to send, as real numbers, without elements that share memory with others, as after expand()."""
        found = {}
        for path, table in self._tables:
            for name, b in table.items() if table else ():
                if b is None or b.is_meta or id(b) in skip:
                    continue
                if b.layout is torch.strided:
                    found[path, name] = _once(as_real(b.detach()))
                elif strict:
                    raise UsageError(
                        f"the buffer {plain_name(f'{path}.{name}').lstrip('.')!r} is sparse, which cannot be sent to "
                        "the other ranks: register a dense copy, or set strategy.broadcast_buffers = False"
                    )
        return found

    def _agree(self, known: list[Key], found: dict[Key, Tensor], world: World) -> set[Key]:
        """The buffers that no rank has changed."""
        changed = [not torch.equal(found[key], self._kept[key]) for key in known]
        mask = torch.tensor(changed, dtype=torch.uint8, device=world.device)
        world.maximum(mask)
        for key, flag in zip(known, mask.tolist(), strict=True):
            if flag:
                self._changing.add(key)
                del self._kept[key]
        return {key for key in known if key not in self._changing}


def _once(buffer: Tensor) -> Tensor:
    """A view without the elements that share memory with others."""
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dim] > 1:
            buffer = buffer.narrow(dim, 0, 1)
    return buffer
