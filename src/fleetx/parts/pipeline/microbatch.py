"""A batch becomes micro-batches."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from fleetx.base.trees import map_tensors, tensors_of
from fleetx.errors import UsageError


def size_of(inputs: Any, target: Any) -> int:
    """Samples in the batch: the first dimension of the first tensor."""
    found = [t for t in tensors_of((inputs, target)) if t.dim()]
    if not found:
        raise UsageError("forward_backward under pipeline needs a batch of tensors, and was given none")
    return len(found[0])


def count(batch: int, number: int, size: int, stages: int, least: int, multiple: int) -> int:
    """How many micro-batches: as said by their number, by their size, or by both. A size of 1 was not said."""
    if size > 1:
        by_size = batch // size
        if batch % size or number not in (1, by_size):
            said = f"{number} micro-batches of {size}" if number > 1 else f"micro-batches of {size}"
            good = (
                f"pass batches of {number * size}" if number > 1 else _nearest(batch, max(by_size, 1), least, multiple)
            )
            raise UsageError(f"a batch of {batch} does not consist of {said}: {good}")
        number = by_size
    if batch % number or number < least or number % multiple:
        need = f"at least {least}" if multiple == 1 else f"a multiple of {multiple}, at least {least}"
        why = "" if batch % number else f": this schedule on {stages} stages needs {need}"
        raise UsageError(
            f"a batch of {batch} and {_many(number)} do not fit{why}. {_nearest(batch, number, least, multiple)}"
        )
    return number


def _many(number: int) -> str:
    return f"{number} micro-batch" + ("es" if number != 1 else "")


def _nearest(batch: int, number: int, least: int, multiple: int) -> str:
    """Numbers of micro-batches that fit this batch, and batches that fit this number."""
    good = [m for m in range(least, batch + 1) if batch % m == 0 and m % multiple == 0]
    near = sorted(sorted(good, key=lambda m: abs(m - number))[:2])
    fitting = max(number, least)
    fitting += -fitting % multiple
    sizes = sorted({b for b in (batch // fitting * fitting, (batch // fitting + 1) * fitting) if b > 0 and b != batch})
    ways = [f"set micro_batch to {' or '.join(map(str, near))}"] if near else []
    if sizes:
        ways.append(f"pass batches of {' or '.join(map(str, sizes))} for {_many(fitting)}")
    return ", or ".join(ways)[:1].upper() + ", or ".join(ways)[1:]


def split(value: Any, batch: int, number: int) -> list[Any]:
    """Tensors as long as the batch are cut along their first dimension; all else goes to every micro-batch."""
    strange = [t for t in tensors_of(value) if t.dim() and len(t) not in (1, batch)]
    if strange:
        named = value if isinstance(value, dict) else {}
        masks = any(named.get(name) is strange[0] for name in ("mask_pos", "mask_label"))
        hint = '; make the loader with masked="row"' if masks else ""
        raise UsageError(
            f"the batch has {batch} samples, and a tensor of the shape {tuple(strange[0].shape)} has neither so many "
            f"nor one: its first dimension must be that of the batch{hint}"
        )

    def cut(index: int) -> Any:
        step = batch // number

        def piece(t: Tensor) -> Tensor:
            return t[index * step : (index + 1) * step] if t.dim() and len(t) == batch else t

        return map_tensors(piece, value)

    return [cut(i) for i in range(number)]


def digest(value: Any, others: Any, device: torch.device) -> Tensor:
    """A number that differs, almost surely, where the values differ."""
    total = torch.full((1,), zlib.crc32(repr(others).encode()), dtype=torch.int64, device=device)
    for place, t in enumerate(tensors_of(value), start=1):
        flat = t.detach().contiguous().reshape(-1)
        bits = flat.view(_INTEGERS[t.element_size()]) if t.element_size() in _INTEGERS and not t.is_complex() else None
        if bits is not None and bits.numel():
            weighted = (
                bits.to(torch.int64).sum() * place + bits[:: max(1, bits.numel() // 64)].to(torch.int64).cumsum(0).sum()
            )
            total += weighted.to(device)
    return total


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
