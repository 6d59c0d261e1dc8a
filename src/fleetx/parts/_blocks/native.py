"""The compiled codec, for fp32 values in host memory. It releases the GIL."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fleetx.base.compiled import Library

_library = Library(
    Path(__file__).with_name("_blocks"),
    fleetx_encode_blocks="ppnniippi",
    fleetx_decode_blocks="pnniippi",
)


def fits(values: Tensor) -> bool:
    here = values.device.type == "cpu" and values.dtype is torch.float32 and values.is_contiguous()
    return here and not hasattr(values, "fake_mode") and _library.available()


def encode(blocks: Tensor, bits: int, noise: Tensor | None, rows: Tensor, *, keep: bool) -> None:
    """keep: leave what is rounded off in the blocks."""
    count, block = blocks.shape
    room, threads = _room(block)
    _library.loaded().fleetx_encode_blocks(
        *(blocks.data_ptr(), None if noise is None else noise.data_ptr()),
        *(count, block, bits, keep, room.data_ptr(), rows.data_ptr(), threads),
    )
    if keep:
        increment_version([blocks])  # torch does not see the change


def decode(rows: Tensor, bits: int, out: Tensor, *, add: bool) -> None:
    """add: add to `out` instead of overwriting it."""
    count, block = out.shape
    room, threads = _room(block)
    _library.loaded().fleetx_decode_blocks(
        *(rows.data_ptr(), count, block, bits, add, room.data_ptr(), out.data_ptr(), threads)
    )
    increment_version([out])


def _room(block: int) -> tuple[Tensor, int]:
    """Scratch space for the codes of one block per thread, and the number of threads."""
    threads = torch.get_num_threads()
    return torch.empty(threads, block), threads
