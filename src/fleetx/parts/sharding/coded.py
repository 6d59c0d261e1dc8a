"""A reduce-scatter with few bits per value, for `FSDPModule.set_custom_reduce_scatter`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleetx.comm import duplex
from fleetx.engine.context import SetupContext
from fleetx.parts._blocks import decode, encode


class CodedReduceScatter:
    """Every rank sends each rank its share in blocks of few bits, and sums what it received in full precision.

    Values are rounded up or down at random, so that errors average out: keeping what was rounded off would take a copy
    of the whole gradient on every rank. Has the interface of torch's `ReduceScatter`.
    """

    def __init__(self, bits: int, block: int, ctx: SetupContext, segment: int):
        self._bits, self._block, self._ctx, self._segment = bits, block, ctx, segment

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        ranks, size = group.size(), output_tensor.numel()
        dtype = torch.promote_types(input_tensor.dtype, torch.float32)
        rows = -(-size // self._block)
        blocks = torch.zeros(ranks, rows * self._block, dtype=dtype, device=input_tensor.device)
        blocks[:, :size] = input_tensor.view(ranks, size)
        seed = seed_of(self._ctx.clock, self._ctx.world.rank, self._segment)
        random = torch.Generator(input_tensor.device).manual_seed(seed)
        sent = encode(blocks.view(-1, self._block), self._bits, random)
        received = duplex.all_to_all(sent, group)
        total = decode(received, self._bits, dtype).view(ranks, -1)[:, :size].sum(0)
        output_tensor.copy_(total / ranks if op == dist.ReduceOp.AVG else total)


def seed_of(clock: tuple[int, int], rank: int, segment: int) -> int:
    """Differs for every step, rank and segment. clock: the round, and the number of steps in it."""
    return int.from_bytes(hashlib.sha256(repr((clock, rank, segment)).encode()).digest()[:7])
