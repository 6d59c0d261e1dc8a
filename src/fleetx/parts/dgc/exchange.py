"""Reduce one bucket: large tensors as payloads of their largest values, small ones uncompressed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from fleetx.base.worker_thread import WorkerThread
from fleetx.comm.paths import Network
from fleetx.engine.context import Outgoing
from fleetx.parts.dgc import on_device
from fleetx.parts.dgc.codec import Header, decode_add, encode, header
from fleetx.parts.dgc.payload import wanted


@dataclass(frozen=True)
class LargeTensor:
    """A gradient to compress, with the u and v that this rank accumulates for it.

    new: where to write the new u and v, if the old ones must be kept.
    """

    g: Tensor
    p: Tensor
    u: Tensor
    v: Tensor
    new: tuple[Tensor, Tensor] | None
    momentum: float
    decay: float


@dataclass(frozen=True)
class Exchange:
    """How to reduce a bucket. `factor` is what its gradients are multiplied by."""

    tensors: list[LargeTensor | Tensor]
    sparsity: float
    factor: float
    half: bool
    norm_limit: float | None

    def start(self, bucket: Outgoing, thread: WorkerThread) -> Future[Tensor]:
        """Send the small tensors, then have `thread` encode the large ones.

        Small tensors are often most of the bytes. They are ready, so they are sent while this bucket and those before
        it are still being encoded.
        """
        small = [t for t in self.tensors if isinstance(t, Tensor) and t.numel()]
        if bucket.buffer.device.type != "cpu":  # a stream runs them in order anyway: nothing to gain
            return thread.submit(lambda: self._on_device(bucket, small))
        means = bucket.network.mean(torch.cat([g.reshape(-1) for g in small]), bucket.index) if small else None
        return thread.submit(lambda: self._on_host(bucket, small, means))

    def _on_host(self, bucket: Outgoing, small: list[Tensor], means: Future[Tensor] | None) -> Future[Tensor]:
        """Communication runs on `network.thread`, while this thread clears gradients and encodes the next bucket."""
        network, large = bucket.network, self._large
        gathered: Future[list[Tensor]] | None = None
        if large:
            payloads = torch.cat([self._encode(t) for t in large])
            gathered = network.thread.submit(lambda: network.path(bucket.index).gather(payloads))
        for t in large:
            t.g.zero_()  # while the payloads travel

        def finish() -> Tensor:
            if gathered is not None:
                self._add(large, gathered.wait())  # it was submitted first, so this only raises its exception
            if means is not None:
                _copy(means.wait(), small)
            return bucket.buffer

        return network.thread.submit(finish)

    def _on_device(self, bucket: Outgoing, small: list[Tensor]) -> Future[Tensor]:
        network, large = bucket.network, self._large
        uncompressed = network.thread.submit(lambda: _average(small, network, bucket.index)) if small else None
        payloads = torch.cat([self._encode(t) for t in large]) if large else None

        def finish() -> Tensor:
            if uncompressed is not None:
                uncompressed.wait()  # it was submitted first, so this only raises its exception
            if payloads is not None:
                payloads.record_stream(torch.cuda.current_stream(payloads.device))  # they come from another stream
                self._add_messages(large, network.path(bucket.index).gather_equal(payloads))
            return bucket.buffer

        return network.thread.submit(finish)

    @property
    def _large(self) -> list[LargeTensor]:
        return [t for t in self.tensors if isinstance(t, LargeTensor)]

    def _encode(self, t: LargeTensor) -> Tensor:
        u_out, v_out = (_flat(t.new[0]), _flat(t.new[1])) if t.new else (None, None)
        return encode(
            _in_memory_order(t.g, t.p),
            _flat(t.u),
            _flat(t.v),
            momentum=t.momentum,
            factor=1.0 / self.factor,
            sparsity=self.sparsity,
            half=self.half,
            decay=t.decay,
            p=_flat(t.p.detach()),
            u_out=u_out,
            v_out=v_out,
            norm_limit=self.norm_limit,
        )

    def _add(self, large: list[LargeTensor], messages: list[Tensor]) -> None:
        """Add the mean of what the ranks sent to each gradient, which has been zeroed."""
        by_rank = [_split(message, len(large)) for message in messages]
        for i, t in enumerate(large):
            out = _in_memory_order(t.g, t.p)
            for payloads in by_rank:  # in rank order, so that every rank gets the same sum bit for bit
                head, payload = payloads[i]
                if not head.finite:
                    out.fill_(float("nan"))  # makes the overflow visible on every rank
                    break
                decode_add(payload, out, self.factor / len(messages), head=head)
            _write(out, t)

    def _add_messages(self, large: list[LargeTensor], messages: Tensor) -> None:
        """The same on an accelerator, where the messages of all ranks have the same length."""
        layouts = [on_device.MessageLayout(t.g.numel(), wanted(t.g.numel(), self.sparsity), self.half) for t in large]
        parts = messages.split([layout.bytes for layout in layouts], dim=1)
        for t, layout, part in zip(large, layouts, parts, strict=True):
            out = _in_memory_order(t.g, t.p).zero_()
            on_device.decode_add(part, out, self.factor / len(messages), layout)
            _write(out, t)


def _write(out: Tensor, t: LargeTensor) -> None:
    """Copy `out` to the gradient, unless they share memory because gradient and parameter have the same strides."""
    if t.g.stride() != t.p.stride():
        t.g.copy_(out.as_strided(t.p.shape, t.p.stride()))


def _split(message: Tensor, count: int) -> list[tuple[Header, Tensor]]:
    """Split concatenated payloads. Each header is read only once: there is one per rank and tensor."""
    out = []
    for _ in range(count):
        head = header(message)
        out.append((head, message[: head.length]))
        message = message[head.length :]
    return out


def _average(small: list[Tensor], network: Network, number: int) -> None:
    flat = torch.cat([g.reshape(-1) for g in small]).div_(network.parties)
    network.path(number).sum_here(flat)
    _copy(flat, small)


def _copy(flat: Tensor, to: list[Tensor]) -> None:
    for g, values in zip(to, flat.split([g.numel() for g in to]), strict=True):
        g.copy_(values.view_as(g))


# u, v and p have the memory layout of the parameter, which may be channels-last. So do gradients in DDP's buckets, but
# not those that were collected outside backward.
def _flat(t: Tensor) -> Tensor:
    return t.as_strided((t.numel(),), (1,))


def _in_memory_order(g: Tensor, p: Tensor) -> Tensor:
    return _flat(g) if g.stride() == p.stride() else _flat(torch.empty_like(p).copy_(g))
