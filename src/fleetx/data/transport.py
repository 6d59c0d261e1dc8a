"""From a worker to the process that trains.

Every tensor that a worker sends costs half a millisecond, however small: a file of shared memory, and its descriptor
through a socket. So the small ones of a batch travel in one. Large ones are made where they can be shared at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

SMALL = 1 << 20  # bytes: copying more would take longer than sending it by itself
_ALIGNED = 16


class Contents(NamedTuple):
    """What lies in a tensor of bytes: names, types, shapes and places. Hashable, so that it can be its key."""

    parts: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]
    order: tuple[str, ...]  # of all names of the batch


def room(*shape: int) -> Tensor:
    """An empty float tensor; in a worker, in memory that the other process will find."""
    if get_worker_info() is None:
        return torch.empty(shape)
    storage = torch.UntypedStorage._new_shared(4 * math.prod(shape), device="cpu")
    return torch.empty(0).set_(storage, 0, shape)  # type: ignore[call-overload]


def packed(batch: dict[str, Tensor]) -> dict[str | Contents, Tensor]:
    """The batch as it should be sent: in a worker, its small tensors as one."""
    small = {name: tensor for name, tensor in batch.items() if tensor.nbytes < SMALL}
    if get_worker_info() is None or len(small) < 2:
        return dict(batch.items())
    parts, end = [], 0
    for name, tensor in small.items():
        parts.append((name, tensor.dtype, tuple(tensor.shape), end))
        end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    contents = Contents(tuple(parts), tuple(batch))
    together = torch.empty(end, dtype=torch.uint8)
    for name, view in _views(together, contents).items():
        view.copy_(small[name])
    large: dict[str | Contents, Tensor] = {name: tensor for name, tensor in batch.items() if name not in small}
    return {**large, contents: together}


def unpacked(sent: dict[str | Contents, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    order: tuple[str, ...] = ()
    for key, tensor in sent.items():
        if isinstance(key, str):
            found[key] = tensor
        else:
            order = key.order
            found |= _views(tensor, key)
    return {name: found[name] for name in order} if order else found


def _views(together: Tensor, contents: Contents) -> dict[str, Tensor]:
    ends = ((place, place + math.prod(shape) * dtype.itemsize) for _, dtype, shape, place in contents.parts)
    return {
        name: together[begin:end].view(dtype).reshape(shape)
        for (name, dtype, shape, _), (begin, end) in zip(contents.parts, ends, strict=True)
    }
