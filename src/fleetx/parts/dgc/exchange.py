"""Reduce one bucket: large tensors as payloads of their largest values, small ones uncompressed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

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

    def run(self, bucket: Outgoing) -> Future[Tensor]:
        """For a WorkerThread. Communication runs on `network.thread`, while this thread encodes the next payloads."""
        network = bucket.network
        large = [t for t in self.tensors if isinstance(t, LargeTensor)]
        small = [t for t in self.tensors if isinstance(t, Tensor) and t.numel()]
        uncompressed = network.thread.submit(lambda: _average(small, network, bucket.index)) if small else None
        payloads = torch.cat([self._encode(t) for t in large]) if large else None

        def finish() -> Tensor:
            if uncompressed is not None:
                uncompressed.wait()  # it was submitted first, so this only raises its exception
            if payloads is not None and bucket.buffer.device.type == "cpu":
                self._add(large, network.gather(payloads, bucket.index))
            elif payloads is not None:
                payloads.record_stream(torch.cuda.current_stream(payloads.device))  # they come from another stream
                self._add_messages(large, network.gather_equal(payloads, bucket.index))
            return bucket.buffer

        return network.thread.submit(finish)

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
        """Replace each gradient by the mean of what the ranks sent."""
        by_rank = [_split(message, len(large)) for message in messages]
        for i, t in enumerate(large):
            out = _in_memory_order(t.g, t.p).zero_()
            for payloads in by_rank:  # by rank, so that every rank gets bitwise the same sum
                head, payload = payloads[i]
                if not head.finite:
                    out.fill_(float("nan"))  # makes the overflow visible on every rank
                    break
                decode_add(payload, out, self.factor / len(messages), head=head)
            _write(out, t)

    def _add_messages(self, large: list[LargeTensor], messages: Tensor) -> None:
        """The same on an accelerator, where the messages of all ranks have one length."""
        layouts = [on_device.MessageLayout(t.g.numel(), wanted(t.g.numel(), self.sparsity), self.half) for t in large]
        parts = messages.split([layout.bytes for layout in layouts], dim=1)
        for t, layout, part in zip(large, layouts, parts, strict=True):
            out = _in_memory_order(t.g, t.p).zero_()
            on_device.decode_add(part, out, self.factor / len(messages), layout)
            _write(out, t)


def _write(out: Tensor, t: LargeTensor) -> None:
    """Into the gradient, unless it is there: a gradient in the layout of its parameter was changed in place."""
    if t.g.stride() != t.p.stride():
        t.g.copy_(out.as_strided(t.p.shape, t.p.stride()))


def _split(message: Tensor, count: int) -> list[tuple[Header, Tensor]]:
    """Split concatenated payloads. Their headers are read once: there are as many as ranks times tensors."""
    out = []
    for _ in range(count):
        head = header(message)
        out.append((head, message[: head.length]))
        message = message[head.length :]
    return out


def _average(small: list[Tensor], network: Network, number: int) -> None:
    flat = torch.cat([g.reshape(-1) for g in small]).div_(network.parties)
    network.sum_here(flat, number)
    for g, mean in zip(small, flat.split([g.numel() for g in small]), strict=True):
        g.copy_(mean.view_as(g))


# u, v and p have the memory layout of the parameter, which may be channels-last. So do gradients in DDP's buckets, but
# not those that were collected outside backward.
def _flat(t: Tensor) -> Tensor:
    return t.as_strided((t.numel(),), (1,))


def _in_memory_order(g: Tensor, p: Tensor) -> Tensor:
    return _flat(g) if g.stride() == p.stride() else _flat(torch.empty_like(p).copy_(g))
