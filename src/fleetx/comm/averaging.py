"""Average tensors over the ranks, in flat buckets."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.futures import Future

from fleetx.base import seams
from fleetx.base.trees import as_real
from fleetx.comm.paths import Network
from fleetx.comm.session import waits

BUCKET_BYTES = 32 * 1024 * 1024


@waits
def average(tensors: Sequence[Tensor], network: Network) -> None:
    """Average in place and wait. One bucket is sent while the next is filled; at most two exist at a time."""
    pending: deque[tuple[list[Tensor], Future[Tensor]]] = deque()
    for number, bucket in enumerate(buckets(tensors)):
        if len(pending) == 2:
            _unpack(*pending.popleft())
        chosen = [as_real(tensors[i].detach()) for i in bucket]
        pending.append((chosen, network.mean(pack(chosen), number)))
    while pending:
        _unpack(*pending.popleft())


def average_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that `average` allocates at most: two consecutive buckets."""
    sizes = [sum(tensors[i].nbytes for i in bucket) for bucket in buckets(tensors)]
    return max((a + b for a, b in itertools.pairwise([*sizes, 0])), default=0)


def buckets(tensors: Sequence[Tensor], most: float = BUCKET_BYTES) -> Iterator[list[int]]:
    """Yield the positions of the tensors in each bucket: one dtype, at most `most` bytes (a larger tensor is alone).

    A complex tensor counts as a real one with another dimension.
    """
    bucket: list[int] = []
    size, last = 0, None
    dtypes = [as_real(t.detach()).dtype for t in tensors]
    for i in sorted(range(len(tensors)), key=lambda i: str(dtypes[i])):  # stable: keeps the order within a dtype
        if bucket and (size + tensors[i].nbytes > most or dtypes[i] is not last):
            yield bucket
            bucket, size = [], 0
        bucket.append(i)
        size, last = size + tensors[i].nbytes, dtypes[i]
    if bucket:
        yield bucket


def pack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views into a flat buffer, with the shapes of the tensors that were packed into it."""
    return [v.view_as(t) for v, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]


def _unpack(bucket: list[Tensor], mean: Future[Tensor]) -> None:
    seams.foreach_copy_(bucket, views(mean.wait(), bucket))


@waits
def arrived(mean: Future[Tensor]) -> Tensor:
    return mean.wait()
