"""One bucket between the ranks: large tensors as payloads of their largest values, small ones whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from fleetx.comm.paths import Network
from fleetx.engine.context import Bucket
from fleetx.parts.dgc.codec import decode_add, encode, header


@dataclass(frozen=True)
class Carried:
    """A gradient with what its rank keeps for it. `new`: where the new u and v go, if the old ones must stay."""

    g: Tensor
    p: Tensor
    u: Tensor
    v: Tensor
    new: tuple[Tensor, Tensor] | None
    momentum: float
    decay: float


@dataclass(frozen=True)
class Exchange:
    """What is to be done to a bucket. `factor` is by what its gradient is multiplied."""

    tensors: list[Carried | Tensor]
    sparsity: float
    factor: float
    half: bool
    limit: float | None

    def run(self, bucket: Bucket, network: Network) -> Future[Tensor]:
        """For a line. What travels does so on another: small tensors meanwhile, payloads while the next are made."""
        large = [t for t in self.tensors if isinstance(t, Carried)]
        small = [t for t in self.tensors if isinstance(t, Tensor)]
        whole = network.thread.submit(lambda: _mean_whole(small, network, bucket.index)) if small else None
        payloads = torch.cat([self._encode(t) for t in large]) if large else None

        def finish() -> Tensor:
            if whole is not None:
                whole.wait()  # it was asked for before us: this only raises what it raised
            if payloads is not None:
                self._add_up(large, network.gather(payloads, bucket.index))
            return bucket.buffer

        return network.thread.submit(finish)

    def _add_up(self, large: list[Carried], messages: list[Tensor]) -> None:
        by_rank = [_split(message, len(large)) for message in messages]
        for i, t in enumerate(large):
            out = _in_memory_order(t.g, t.p).zero_()
            for payloads in by_rank:  # in the order of the ranks, so that all of them get the same sum
                if not header(payloads[i]).finite:
                    out.fill_(float("nan"))  # whoever looks for overflows finds this one, on every rank
                    break
                decode_add(payloads[i], out, self.factor / len(messages))
            _write_back(out, t.g, t.p)

    def _encode(self, t: Carried) -> Tensor:
        into: dict[str, Any] = {} if t.new is None else {"u_out": _flat(t.new[0]), "v_out": _flat(t.new[1])}
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
            norm_limit=self.limit,
            **into,
        )


def _split(message: Tensor, count: int) -> list[Tensor]:
    """Payloads that follow one another: each tells its length."""
    out = []
    for _ in range(count):
        out.append(message[: header(message).length])
        message = message[out[-1].numel() :]
    return out


def _mean_whole(small: list[Tensor], network: Network, number: int) -> None:
    flat = torch.cat([g.reshape(-1) for g in small]).div_(network.world.size)
    network.sum_here(flat, number)
    for g, mean in zip(small, flat.split([g.numel() for g in small]), strict=True):
        g.copy_(mean.view_as(g))


# u, v and p lie in memory in the order of the parameter, which may be channels-last; so does a gradient in DDP's
# buckets, but not one that was collected outside of a backward.
def _flat(t: Tensor) -> Tensor:
    return t.as_strided((t.numel(),), (1,))


def _in_memory_order(g: Tensor, p: Tensor) -> Tensor:
    return _flat(g) if g.stride() == p.stride() else _flat(torch.empty_like(p).copy_(g))


def _write_back(out: Tensor, g: Tensor, p: Tensor) -> None:
    if out.data_ptr() != g.data_ptr():
        g.copy_(out.as_strided(p.shape, p.stride()))
