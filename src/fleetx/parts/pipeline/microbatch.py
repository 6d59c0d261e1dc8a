"""Splits a batch into micro-batches."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fleetx.base.trees import map_tensors, tensors_of
from fleetx.errors import UsageError


def size_of(inputs: Any, target: Any) -> int:
    """Samples in the batch: the first dimension of the first tensor."""
    tensors = [t for t in tensors_of((inputs, target)) if t.dim()]
    if not tensors:
        raise UsageError("under pipeline, fleet.forward_backward needs the batch: pass its tensors")
    return len(tensors[0])


def count(batch: int, number: int, size: int, stages: int, least: int, multiple: int) -> int:
    """How many micro-batches to make: by their number, their size, or both. A size of 1 means not set."""
    if size > 1:
        by_size = batch // size
        if batch % size or number not in (1, by_size):
            wanted = f"{number} micro-batches of {size}" if number > 1 else f"micro-batches of {size}"
            hint = (
                f"pass batches of {number * size}" if number > 1 else _nearest(batch, max(by_size, 1), least, multiple)
            )
            raise UsageError(f"a batch of {batch} cannot be split into {wanted}: {hint}")
        number = by_size
    if batch % number or number < least or number % multiple:
        need = f"at least {least}" if multiple == 1 else f"a multiple of {multiple}, at least {least}"
        why = "" if batch % number else f", because this schedule on {stages} stages needs {need}"
        raise UsageError(
            f"a batch of {batch} cannot be split into {_many(number)}{why}: {_nearest(batch, number, least, multiple)}"
        )
    return number


def _many(number: int) -> str:
    return f"{number} micro-batch" + ("es" if number != 1 else "")


def _nearest(batch: int, number: int, least: int, multiple: int) -> str:
    """Suggest numbers of micro-batches for this batch, and batches for this number."""
    good = [m for m in range(least, batch + 1) if batch % m == 0 and m % multiple == 0]
    near = sorted(sorted(good, key=lambda m: abs(m - number))[:2])
    fitting = max(number, least)
    fitting += -fitting % multiple
    sizes = sorted({b for b in (batch // fitting * fitting, (batch // fitting + 1) * fitting) if b > 0 and b != batch})
    hints = [f"set micro_batch to {' or '.join(map(str, near))}"] if near else []
    if sizes:
        hints.append(f"pass batches of {' or '.join(map(str, sizes))} for {_many(fitting)}")
    return ", or ".join(hints)


def split(value: Any, batch: int, number: int) -> list[Any]:
    """Cut tensors that are as long as the batch along their first dimension; pass the rest to every micro-batch."""
    odd = [t for t in tensors_of(value) if t.dim() and len(t) not in (1, batch)]
    if odd:
        by_name = value if isinstance(value, dict) else {}
        masks = any(by_name.get(name) is odd[0] for name in ("mask_pos", "mask_label"))
        hint = ', so create the loader with masked="row"' if masks else ""
        raise UsageError(
            f"a tensor of shape {tuple(odd[0].shape)} cannot be split with a batch of {batch} samples: its first "
            f"dimension must be that of the batch, or 1{hint}"
        )
    size = batch // number

    def cut(index: int, t: Tensor) -> Tensor:
        return t[index * size : (index + 1) * size] if t.dim() and len(t) == batch else t

    return [map_tensors(partial(cut, i), value) for i in range(number)]


def digest(value: Any, others: Any, device: torch.device) -> Tensor:
    """A number that almost certainly differs if the values differ."""
    total = torch.full((1,), zlib.crc32(repr(others).encode()), dtype=torch.int64, device=device)
    for position, t in enumerate(tensors_of(value), start=1):
        if t.element_size() in _INTEGERS and not t.is_complex() and t.numel():
            bits = t.detach().contiguous().reshape(-1).view(_INTEGERS[t.element_size()])
            sample = bits[:: max(1, bits.numel() // 64)].to(torch.int64)
            total += (bits.to(torch.int64).sum() * position + sample.cumsum(0).sum()).to(device)
    return total


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
