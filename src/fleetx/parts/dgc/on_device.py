"""The codec on an accelerator. All sizes follow from n and k, so the host never waits for the device.

A message holds one tensor, and has the same length on every rank:

    values   k of them, in the order of their indices: fp32, or fp16 times a power of two
    top      the bits of the largest |v|, which tell whether everything is finite and, for fp16, the power of two
    indices  in Elias-Fano code: the low `shift` bits of each, then a bitmap whose i-th one, counted from 0, is at bit
             (index >> shift) + i. Absent if k is n.

If fewer than k values are nonzero, zeros are sent in place of the missing ones; they change nothing. Decoding gives the
same result, bit for bit, as with the payloads of the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fleetx.parts.dgc import selection
from fleetx.parts.dgc.payload import INFINITY_BITS, MAX_HALF, Update

_AT_ONCE = 1 << 22  # values decoded at a time


@dataclass(frozen=True)
class MessageLayout:
    """Where the pieces of a message are, in bytes. Every piece starts at a multiple of 8."""

    n: int
    k: int
    half: bool

    @property
    def shift(self) -> int:
        return (self.n // self.k).bit_length() - 1

    @property
    def map_bits(self) -> int:
        return self.k + (self.n - 1 >> self.shift)

    @property
    def sizes(self) -> list[int]:
        """Bytes of the values, the top, the low bits and the bitmap."""
        coded = [0, 0] if self.k == self.n else [(self.k * self.shift + 7) // 8, (self.map_bits + 7) // 8]
        return [-(-size // 8) * 8 for size in (self.k * (2 if self.half else 4), 4, *coded)]

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


def encode(update: Update) -> Tensor:
    """Like codec.encode, but returns a message."""
    layout = MessageLayout(update.n, update.k, update.half)
    if update.k == update.n:
        top = selection.largest(update)
        values, update.v_out[:] = _rounded(update.v_out, update.half, top)
        return torch.cat([_padded(values), _padded(top.view(1))])
    indices, top = selection.selector(update)(update)
    chosen = update.v_out.index_select(0, indices)
    values, rest = _rounded(chosen, update.half, top)
    sent = selection.magnitudes(chosen) >= _lowest(update.half, top)
    update.v_out.index_copy_(0, indices, torch.where(sent, rest, chosen))
    update.u_out.index_copy_(0, indices, update.u_out.index_select(0, indices).masked_fill_(sent, 0.0))
    values = values.masked_fill(~sent, 0.0)
    return torch.cat([_padded(part) for part in (values, top.view(1), *_coded(indices, layout))])


def decode_add(messages: Tensor, out: Tensor, scale: float, layout: MessageLayout) -> None:
    """out[i] += scale * value for every value in the messages: a row per rank, added in the order of the rows."""
    for rows in messages.split(max(1, _AT_ONCE // layout.k)):
        _add_rows(rows, out, scale, layout)


def _add_rows(messages: Tensor, out: Tensor, scale: float, layout: MessageLayout) -> None:
    values, tops, lows, maps = messages.split(layout.sizes, dim=1)
    values = _viewed(values, torch.float16 if layout.half else torch.float32)[:, : layout.k]
    tops = _viewed(tops, torch.int32)[:, :1]
    # In float64, where the product of two floats is exact: see decode.c.
    factor = float(np.float32(scale)) * (_power(_exponent(tops)).double() if layout.half else 1.0)
    added = values.double() * factor
    added.masked_fill_(tops >= INFINITY_BITS, float("nan"))  # makes the overflow visible on every rank
    if layout.k == layout.n:
        for row in added:
            out.copy_(out.double().add_(row))
        return
    for indices, row in zip(_indices(lows, maps, layout), added, strict=True):
        out.index_copy_(0, indices, out.index_select(0, indices).double().add_(row).float())


# --- values -----------------------------------------------------------------------------------------
def _exponent(top: Tensor) -> Tensor:
    """The power of two that scales the largest value to [2**14, 2**15), as in codec.c."""
    return ((top >> 23) - 127 - 14).clamp(-112, 113)


def _power(exponent: Tensor) -> Tensor:
    """2**exponent, from its bits."""
    return (exponent + 127 << 23).view(torch.float32)


def _lowest(half: bool, top: Tensor) -> Tensor | int:
    """The smallest magnitude that is not rounded to zero."""
    return ((_exponent(top) - 24).clamp(min=-126) + 127) << 23 if half else 1


def _rounded(x: Tensor, half: bool, top: Tensor) -> tuple[Tensor, Tensor]:
    """The values as they are sent, and the rounding errors."""
    if not half:
        return x.clone(), torch.zeros_like(x)
    exponent = _exponent(top)
    halves = x.mul(_power(-exponent)).clamp_(-MAX_HALF, MAX_HALF).half()
    return halves, x - halves.float().mul_(_power(exponent))


# --- indices ----------------------------------------------------------------------------------------
def _coded(indices: Tensor, layout: MessageLayout) -> tuple[Tensor, Tensor]:
    device = indices.device
    lows = (indices.unsqueeze(1) >> torch.arange(layout.shift, device=device)) & 1
    places = (indices >> layout.shift) + torch.arange(layout.k, device=device)
    bits = torch.zeros(layout.map_bits, dtype=torch.uint8, device=device).index_fill_(0, places, 1)
    return _packed(lows.to(torch.uint8).view(-1)), _packed(bits)


def _indices(lows: Tensor, maps: Tensor, layout: MessageLayout) -> Tensor:
    """A row of indices per message."""
    k, shift, device = layout.k, layout.shift, maps.device
    bits = _unpacked(maps)[:, : layout.map_bits]
    order = bits.cumsum(1).sub_(1).masked_fill_(bits == 0, k)  # which index a bit belongs to; k: none
    places = torch.arange(layout.map_bits, device=device).expand_as(order)
    found = torch.empty(len(maps), k + 1, dtype=torch.int64, device=device).scatter_(1, order, places)[:, :k]
    low = _unpacked(lows)[:, : k * shift].view(len(maps), k, shift).long() << torch.arange(shift, device=device)
    return ((found - torch.arange(k, device=device)) << shift) + low.sum(2)


def _packed(bits: Tensor) -> Tensor:
    """Bytes, filled from the lowest bit."""
    eights = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (eights << _eight(bits)).sum(1, dtype=torch.uint8)


def _unpacked(rows: Tensor) -> Tensor:
    return ((rows.unsqueeze(2) >> _eight(rows)) & 1).flatten(1)


def _eight(beside: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=beside.device)


def _padded(part: Tensor) -> Tensor:
    data = part.view(torch.uint8)
    return torch.nn.functional.pad(data, (0, -len(data) % 8))


def _viewed(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.contiguous().view(dtype)
