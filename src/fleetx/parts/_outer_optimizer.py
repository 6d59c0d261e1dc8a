"""The end of a period of local updates: the ranks exchange how far they have moved, and take a step together.

    x = s - a                        s: this rank's parameters, a: the anchor, equal on all ranks
    d = -(mean over the ranks of x)  the outer gradient, encoded on the wire as the strategy declares
    b <- outer_momentum * b + d
    a <- a - outer_lr * (d + outer_momentum * b)
    p <- a                           at once, or one period later:
    p <- p + share * (a - s)         each rank keeps its updates since s, and gives up its distance from the others

If one period shrinks a distance by a factor r, which is 0 in steep directions and 1 in flat ones, the last line leaves
r - share of it. A share of 1/2 halves the distance everywhere; a share of 1 flips it in steep directions.

If nothing is encoded and there is no outer optimizer, the new a is the mean of s, whatever a was before. Then no anchor
is kept, and s itself is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from fleetx.base.trees import as_real
from fleetx.comm.averaging import arrived, buckets, pack, views
from fleetx.comm.paths import Network, completed
from fleetx.engine.context import Outgoing, StepContext
from fleetx.engine.dtensors import local


@dataclass(frozen=True)
class OuterOptimizer:
    """The step above. share: None if it is taken at once."""

    lr: float
    momentum: float
    share: float | None = None

    def start(self, ctx: StepContext) -> None:
        """Start keeping an anchor. Call this while the ranks are equal."""
        ctx.state["anchor"] = {name: local(p).detach().clone() for p, name in ctx.names.items()}
        if self.momentum and "outer" not in ctx.state:
            ctx.state["outer"] = {name: torch.zeros_like(a) for name, a in ctx.state["anchor"].items()}

    def now(self, params: Sequence[Tensor], ctx: StepContext) -> None:
        """Exchange and step. One bucket is sent while the next is filled; at most two exist at a time."""
        pending: deque[tuple[_Flat, Future[Tensor]]] = deque()
        for bucket in _bucketed(params, ctx):
            if len(pending) == 2:
                self._step(*pending.popleft(), ctx)
            pending.append((bucket, self._send(bucket, pack(bucket.tensors), ctx, ctx.network)))
        while pending:
            self._step(*pending.popleft(), ctx)

    def _send(self, bucket: _Flat, flat: Tensor, ctx: StepContext, network: Network) -> Future[Tensor]:
        if "anchor" in ctx.state:
            flat -= pack([as_real(ctx.state["anchor"][name]) for name in bucket.names])
        return ctx.mean(Outgoing(flat, views(flat, bucket.tensors), bucket.names, bucket.number, network))

    def _step(self, bucket: _Flat, mean: Future[Tensor], ctx: StepContext, sent: Tensor | None = None) -> None:
        moved = views(arrived(mean), bucket.tensors)
        for i, (p, name, x) in enumerate(zip(bucket.tensors, bucket.names, moved, strict=True)):
            target = x
            if "anchor" in ctx.state:
                target = as_real(ctx.state["anchor"][name])
                if self.momentum:
                    outer = as_real(ctx.state["outer"][name]).mul_(self.momentum).sub_(x)
                    x = x.sub(outer, alpha=self.momentum)
                target.add_(x, alpha=self.lr)
            if sent is None:
                p.copy_(target)
            else:
                p.add_(target - views(sent, bucket.tensors)[i], alpha=self.share or 0.0)


class Delayed:
    """Runs the exchange of one period during the next.

    network: must have its own process groups, because later collectives of a group, even the sum of a single number,
    would wait for the exchange.
    """

    def __init__(self, step: OuterOptimizer, network: Network):
        self._step, self._network = step, network
        self._pending: list[tuple[Tensor, Future[Tensor]]] = []  # for each bucket: s, and the mean of x

    @property
    def under_way(self) -> bool:
        return bool(self._pending)

    def turn(self, params: Sequence[Tensor], ctx: StepContext) -> None:
        """Finish the step in progress and start the next. Every rank must call this in the same round.

        Works bucket by bucket, so that the link stays busy while a mean is applied.
        """
        previous, self._pending = self._pending, []
        for bucket in _bucketed(params, ctx):
            if previous:
                sent, mean = previous[bucket.number]
                self._step._step(bucket, mean, ctx, sent)
            sent = pack(bucket.tensors)
            self._pending.append((sent, self._step._send(bucket, sent.clone(), ctx, self._network)))

    def finish(self, params: Sequence[Tensor], ctx: StepContext) -> None:
        """Finish the step in progress, if any."""
        for bucket in _bucketed(params, ctx) if self._pending else ():
            sent, mean = self._pending[bucket.number]
            self._step._step(bucket, mean, ctx, sent)
        self._pending = []

    def saved(self) -> list[list[Tensor]]:
        """The exchange in progress, for a checkpoint. Waits for its result, and changes nothing."""
        return [[sent, arrived(mean)] for sent, mean in self._pending]

    def load(self, saved: list[list[Tensor]]) -> None:
        self._pending = [(sent, completed(mean)) for sent, mean in saved]


@dataclass(frozen=True)
class _Flat:
    number: int
    tensors: list[Tensor]
    names: list[str]


def _bucketed(params: Sequence[Tensor], ctx: StepContext) -> Iterator[_Flat]:
    names: Any = ctx.names
    held = [local(p).detach() for p in params]
    for number, bucket in enumerate(buckets(held)):
        yield _Flat(number, [as_real(held[i]) for i in bucket], [names[params[i]] for i in bucket])
