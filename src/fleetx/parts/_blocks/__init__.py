"""Encode blocks of values in a few bits each: one row of bytes per block, a scale followed by the codes.

    scale   float32: the largest absolute value of the block, divided by the largest code
    codes   value / scale, rounded to an integer: -32767 to 32767 in 16 bits, -127 to 127 in 8 bits, -7 to 7 in 4 bits,
            two to a byte

A block with a non-finite value has a non-finite scale, so every rank sees it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fleetx.parts._blocks import native

SCALE_BYTES = 4
_LARGEST = {16: 32767.0, 8: 127.0, 4: 7.0}


def row_bytes(block: int, bits: int) -> int:
    return SCALE_BYTES + block * bits // 8


def encode(blocks: Tensor, bits: int, random: torch.Generator | None = None) -> Tensor:
    """(n, block) values -> (n, row_bytes) bytes.

    random: round up or down at random, so that the expected result is the value; None: round to nearest.
    """
    noise = None
    if random is not None:
        noise = torch.rand(blocks.shape, generator=random, dtype=blocks.dtype, device=blocks.device)
    if native.fits(blocks):
        rows = _rows(blocks, bits)
        native.encode(blocks, bits, noise, rows, keep=False)
        return rows
    # Divide in float32 and avoid subnormal scales, so that every device finds the same codes.
    scales = blocks.abs().amax(1).float().div_(_LARGEST[bits]).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = blocks.div(scales.unsqueeze(1))
    codes = codes.round_() if noise is None else codes.add_(noise).floor_()
    codes = codes.clamp_(-_LARGEST[bits], _LARGEST[bits]).nan_to_num_(0.0).to(_stored(bits))
    if bits == 4:
        codes = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    return torch.cat([scales.view(-1, 1).view(torch.uint8), codes.view(torch.uint8)], 1)


def encode_in_place(blocks: Tensor, bits: int) -> Tensor:
    """Like `encode`, rounding to nearest. What is rounded off stays in the blocks."""
    if native.fits(blocks):
        rows = _rows(blocks, bits)
        native.encode(blocks, bits, None, rows, keep=True)
        return rows
    rows = encode(blocks, bits)
    blocks -= decode(rows, bits, blocks.dtype)
    return rows


def decode(rows: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """(n, row_bytes) bytes -> (n, block) values."""
    out = torch.empty(len(rows), (rows.shape[1] - SCALE_BYTES) * 8 // bits, dtype=dtype, device=rows.device)
    if native.fits(out):
        native.decode(rows.contiguous(), bits, out, add=False)
        return out
    return out.copy_(_codes(rows, bits)).mul_(rows[:, :SCALE_BYTES].contiguous().view(torch.float32))


def decode_add(rows: Tensor, bits: int, out: Tensor) -> None:
    """Add the decoded rows to `out`."""
    if native.fits(out):
        native.decode(rows.contiguous(), bits, out, add=True)
    else:
        out += decode(rows, bits, out.dtype)


def _rows(blocks: Tensor, bits: int) -> Tensor:
    return torch.empty(len(blocks), row_bytes(blocks.shape[1], bits), dtype=torch.uint8)


def _codes(rows: Tensor, bits: int) -> Tensor:
    codes = rows[:, SCALE_BYTES:].contiguous().view(_stored(bits))
    return codes if bits != 4 else torch.stack([(codes << 4) >> 4, codes >> 4], 2).flatten(1)


def _stored(bits: int) -> torch.dtype:
    return torch.int16 if bits == 16 else torch.int8


class BlockLayout:
    """Where each tensor of a bucket lies in a matrix of blocks.

    Every tensor starts a new block, so how a value is rounded does not depend on the other tensors of its bucket. The
    number of blocks is a multiple of the number of ranks.
    """

    def __init__(self, sizes: Sequence[int], block: int, ranks: int):
        self._sizes, self._block = sizes, block
        self._rows = [-(-size // block) for size in sizes]
        self.rows = -(-sum(self._rows) // ranks) * ranks

    def blocks(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        out = torch.zeros(self.rows, self._block, dtype=dtype, device=tensors[0].device)
        for into, t in zip(self.values(out), tensors, strict=True):
            into.copy_(t.reshape(-1))
        return out

    def values(self, blocks: Tensor) -> list[Tensor]:
        """Views of the blocks, one per tensor."""
        found = blocks[: sum(self._rows)].split(self._rows)
        return [rows.view(-1)[:size] for rows, size in zip(found, self._sizes, strict=True)]
