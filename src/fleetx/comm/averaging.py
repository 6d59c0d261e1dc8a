"""The mean of many tensors over the ranks, in flat buckets: never a call per tensor. `Background` copies them all."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.futures import Future

from fleetx.comm.paths import Network

BUCKET_BYTES = 32 * 1024 * 1024


def average(tensors: list[Tensor], network: Network) -> None:
    """In place, waiting for it. One bucket travels while the next is filled, and no more are kept."""
    under_way: deque[tuple[list[Tensor], Future[Tensor]]] = deque()
    for number, bucket in enumerate(buckets(tensors)):
        if len(under_way) == 2:
            _unpack(*under_way.popleft())
        under_way.append((bucket, network.mean(pack(bucket), number)))
    while under_way:
        _unpack(*under_way.popleft())


def buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Of one dtype each, as many as fit."""
    bucket: list[Tensor] = []
    size = 0
    for t in sorted(tensors, key=lambda t: str(t.dtype)):  # which keeps the order inside of a dtype
        bytes_ = t.numel() * t.element_size()
        if bucket and (size + bytes_ > BUCKET_BYTES or t.dtype is not bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(t)
        size += bytes_
    if bucket:
        yield bucket


def in_turn(tensors: list[Tensor]) -> int:
    """The most bytes that `average` has under way at once: two buckets."""
    sizes = [sum(t.nbytes for t in bucket) for bucket in buckets(tensors)]
    return max((a + b for a, b in itertools.pairwise([*sizes, 0])), default=0)


def pack(bucket: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in bucket])


def views(flat: Tensor, bucket: list[Tensor]) -> list[Tensor]:
    """The pieces of a flat buffer in the shapes of the tensors that were packed into it."""
    return [v.view_as(t) for v, t in zip(flat.split([t.numel() for t in bucket]), bucket, strict=True)]


def _unpack(bucket: list[Tensor], future: Future[Tensor]) -> None:
    torch._foreach_copy_([t.detach() for t in bucket], views(future.wait(), bucket))


class Background:
    """A mean that is taken while training goes on: p <- p + share * (mean(s) - s), s being what p was when it began.

    Each rank keeps what it did meanwhile, and gives up only its distance from the others. Where a period leaves r of a
    distance, which is 0 in steep directions and 1 in flat ones, it is r - share after this: 1/2 halves it everywhere,
    1 throws the steep ones to the other side. It goes through groups of its own: in one group whatever comes later
    waits, be it the sum of a single number.
    """

    def __init__(self, network: Network, share: float):
        self._network, self._share = network, share
        self._way: Network | None = None
        self._under_way: list[tuple[Tensor, Future[Tensor]]] = []  # for each bucket: what was sent, and its mean

    def turn(self, tensors: list[Tensor]) -> None:
        """Bring in the mean that is under way, and begin the next. Every rank must do so in the same round.

        Bucket by bucket: while one is brought in, those behind it travel, and the link always has something to do.
        """
        if self._way is None:
            self._way = self._network.clone_groups()
        before, self._under_way = self._under_way, []
        for number, bucket in enumerate(buckets(tensors)):
            if before:
                self._bring_in(bucket, *before[number])
            sent = pack(bucket)
            self._under_way.append((sent, self._way.mean(sent.clone(), number)))

    def finish(self, tensors: list[Tensor]) -> None:
        """Bring in the mean that is under way."""
        for bucket, under_way in zip(buckets(tensors) if self._under_way else (), self._under_way, strict=True):
            self._bring_in(bucket, *under_way)
        self._under_way = []

    def saved(self) -> list[list[Tensor]]:
        """What is under way, for a checkpoint: waits for it, and changes nothing."""
        return [[sent, mean.wait()] for sent, mean in self._under_way]

    def load(self, saved: list[list[Tensor]]) -> None:
        self._under_way = [(sent, done(mean)) for sent, mean in saved]

    def _bring_in(self, bucket: list[Tensor], sent: Tensor, mean: Future[Tensor]) -> None:
        torch._foreach_add_([t.detach() for t in bucket], views(mean.wait() - sent, bucket), alpha=self._share)


def done(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future
