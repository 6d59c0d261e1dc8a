"""Average tensors over the ranks in flat buckets, now or in the background."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.futures import Future

from fleetx.base import seams
from fleetx.base.trees import as_real
from fleetx.comm.paths import Network

BUCKET_BYTES = 32 * 1024 * 1024


def average(tensors: list[Tensor], network: Network) -> None:
    """Average in place and wait. One bucket is sent while the next is filled; at most two exist at a time."""
    pending: deque[tuple[list[Tensor], Future[Tensor]]] = deque()
    for number, bucket in enumerate(buckets(tensors)):
        if len(pending) == 2:
            _unpack(*pending.popleft())
        pending.append((bucket, network.mean(_pack(bucket), number)))
    while pending:
        _unpack(*pending.popleft())


def average_bytes(tensors: list[Tensor]) -> int:
    """Bytes that `average` allocates at most: two consecutive buckets."""
    sizes = [sum(t.nbytes for t in bucket) for bucket in buckets(tensors)]
    return max((a + b for a, b in itertools.pairwise([*sizes, 0])), default=0)


def buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype, up to BUCKET_BYTES. A complex tensor counts as a real one with another dimension."""
    bucket: list[Tensor] = []
    size = 0
    for t in sorted(
        (as_real(t.detach()) for t in tensors), key=lambda t: str(t.dtype)
    ):  # stable: keeps the order within a dtype
        if bucket and (size + t.nbytes > BUCKET_BYTES or t.dtype is not bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(t)
        size += t.nbytes
    if bucket:
        yield bucket


def _pack(bucket: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in bucket])


def _views(flat: Tensor, bucket: list[Tensor]) -> list[Tensor]:
    """A flat buffer as tensors of the shapes that were packed into it."""
    return [v.view_as(t) for v, t in zip(flat.split([t.numel() for t in bucket]), bucket, strict=True)]


def _unpack(bucket: list[Tensor], mean: Future[Tensor]) -> None:
    seams.foreach_copy_(bucket, _views(mean.wait(), bucket))


class Background:
    """Average while training continues: p <- p + share * (mean(s) - s), where s is p when the average started.

    Each rank keeps its own updates and only gives up its distance from the others. If one period shrinks a distance by
    a factor r, which is 0 in steep directions and 1 in flat ones, applying the average leaves r - share of it. A share
    of 1/2 halves the distance everywhere; a share of 1 flips it in steep directions.

    It uses its own process groups: within a group, later collectives wait, even the sum of a single number.
    """

    def __init__(self, network: Network, share: float):
        self._network, self._share = network, share
        self._clone: Network | None = None
        self._pending: list[tuple[Tensor, Future[Tensor]]] = []  # for each bucket: what was sent, and its mean

    def turn(self, tensors: list[Tensor]) -> None:
        """Apply the average under way and start the next. Every rank must do this in the same round.

        It goes bucket by bucket, so that the link stays busy while a mean is applied.
        """
        if self._clone is None:
            self._clone = self._network.clone_groups()
        previous, self._pending = self._pending, []
        for number, bucket in enumerate(buckets(tensors)):
            if previous:
                self._apply(bucket, *previous[number])
            sent = _pack(bucket)
            self._pending.append((sent, self._clone.mean(sent.clone(), number)))

    def finish(self, tensors: list[Tensor]) -> None:
        """Apply the average under way, if any."""
        for bucket, (sent, mean) in zip(buckets(tensors), self._pending, strict=bool(self._pending)):
            self._apply(bucket, sent, mean)
        self._pending = []

    def saved(self) -> list[list[Tensor]]:
        """The average under way, for a checkpoint. Waits for it, and changes nothing."""
        return [[sent, mean.wait()] for sent, mean in self._pending]

    def load(self, saved: list[list[Tensor]]) -> None:
        self._pending = [(sent, completed(mean)) for sent, mean in saved]

    def _apply(self, bucket: list[Tensor], sent: Tensor, mean: Future[Tensor]) -> None:
        seams.foreach_add_(bucket, _views(mean.wait() - sent, bucket), alpha=self._share)


def completed(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future
