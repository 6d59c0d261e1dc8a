"""The codec without a compiler: torch for the tensors, numpy for the bits. The same payloads, read and written.

In pieces that fit in the cache: nothing but the payload, and lists as long as what is sent, is as large as a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetx.parts.dgc import payload as form
from fleetx.parts.dgc import rice
from fleetx.parts.dgc.payload import BAD_VALUE, HEADER_BYTES, Header, Update

_CHUNK = 64  # elements that share a top
_PIECE = 1 << 16  # elements at a time; a multiple of _CHUNK
_NOT_FINITE = 0x7F800000
_MOST_HALF = 32752.0  # below 2**15: codec.c says why


def encode(
    g: Tensor,
    u: Tensor,
    v: Tensor,
    *,
    momentum: float,
    factor: float,
    sparsity: float,
    half: bool,
    decay: float = 0.0,
    p: Tensor | None = None,
    u_out: Tensor | None = None,
    v_out: Tensor | None = None,
    norm_limit: float | None = None,
) -> Tensor:
    of = form.update(g, u, v, sparsity=sparsity, decay=decay, p=p, u_out=u_out, v_out=v_out, norm_limit=norm_limit)
    if norm_limit is not None:
        size = abs(factor) * math.sqrt(sum(float(of.g[s].double().square().sum()) for s in _pieces(of.n)))
        if size > norm_limit and math.isfinite(size):
            factor *= norm_limit / size
    tops = _advance(of, momentum, factor, decay)
    top = int(tops.max()) if of.n else 0
    if top >= _NOT_FINITE:
        return _joined(Header(of.n, half, dense=False, finite=False))
    # As in codec.c: the largest lies in [2**14, 2**15) on the wire.
    exponent = max((top >> 23) - 127 - 14, -112) if half else 0
    if of.k == of.n:
        values = [_send(of.v_out[s], half, exponent) for s in _pieces(of.n)]
        return _joined(Header(of.n, half, dense=True, count=of.n, exponent=exponent), *values)
    # Nothing is sent that would be zero on the wire.
    lowest = _bits_of(2.0 ** max(exponent - 24, -126)) if half else 1
    indices = _largest(of, tops, lowest)
    values = []
    for s in _pieces(len(indices)):
        where = torch.from_numpy(indices[s].astype(np.int64)).to(g.device)
        chosen = of.v_out[where]
        values.append(_send(chosen, half, exponent))
        of.v_out[where] = chosen
        of.u_out[where] = 0
    if not values:
        return _joined(Header(of.n, half, dense=False, exponent=exponent))
    shift, *coded = rice.pack(indices)
    header = Header(of.n, half, dense=False, count=len(indices), shift=shift, exponent=exponent)
    return _joined(header, *values, *coded)


def decode_add(payload: Tensor, out: Tensor, scale: float) -> None:
    of = form.for_tensor(payload, out)
    body, flat = payload.cpu().numpy()[HEADER_BYTES:], out.detach().view(-1)
    kind = np.dtype("<f2" if of.half else "<f4")
    values = body[: of.value_bytes].view(kind)
    # All is checked before the first number is changed.
    for s in _pieces(of.count):
        if not np.isfinite(values[s]).all():
            raise ValueError(BAD_VALUE)
    for _ in _places(of, body):
        pass
    # In float64, where the product of two floats is exact: decode.c says why.
    factor = float(np.float32(scale)) * 2.0**of.exponent
    for first, where in _places(of, body):
        added = torch.from_numpy(values[first : first + len(where)].astype(np.float64) * factor).to(out.device)
        places = torch.from_numpy(where).to(out.device)
        flat[places] = (flat[places].double() + added).float()


def _pieces(n: int) -> Iterator[slice]:
    return (slice(start, min(start + _PIECE, n)) for start in range(0, n, _PIECE))


def _magnitudes(x: Tensor) -> Tensor:
    """The bits without the sign: in the order of the magnitudes, infinities and nan largest."""
    return x.view(torch.int32) & 0x7FFFFFFF


def _bits_of(x: float) -> int:
    return int(np.float32(x).view(np.int32))


def _advance(of: Update, momentum: float, factor: float, decay: float) -> Tensor:
    """u and v; returns the largest magnitude in each chunk of v."""
    tops = torch.zeros(-(-of.n // _CHUNK), dtype=torch.int32, device=of.g.device)
    for s in _pieces(of.n):
        x = of.u[s].mul(momentum).add_(of.g[s], alpha=factor)
        if of.p is not None:
            x.add_(of.p[s], alpha=decay)
        y = of.v[s].add(x)
        of.u_out[s], of.v_out[s] = x, y
        bits = _magnitudes(y)
        whole = len(bits) // _CHUNK * _CHUNK
        first = s.start // _CHUNK
        tops[first : first + whole // _CHUNK] = bits[:whole].view(-1, _CHUNK).amax(1)
        if whole < len(bits):
            tops[-1] = bits[whole:].amax()
    return tops


def _largest(of: Update, tops: Tensor, lowest: int) -> NDArray[np.uint32]:
    """The indices of the k largest, in order, without those that are less than `lowest`; the first of equal ones.

    If the k-th largest top is t, the k largest are in the chunks whose top is t or more.
    """
    low = _kth(tops, of.k) if of.k <= len(tops) else _kth_by_bins(of.v_out, of.k)
    low = max(low, lowest)
    found, sizes = [], []
    for s in _pieces(of.n):
        if int(tops[s.start // _CHUNK : -(-s.stop // _CHUNK)].amax()) < low:
            continue
        bits = _magnitudes(of.v_out[s])
        where = (bits >= low).nonzero().view(-1)
        sizes.append(bits[where].cpu().numpy())
        found.append((where.cpu().numpy() + s.start).astype(np.uint32))
    if not found:
        return np.zeros(0, np.uint32)
    indices, magnitudes = np.concatenate(found), np.concatenate(sizes)
    if len(indices) <= of.k:
        return indices
    low = int(np.partition(magnitudes, len(indices) - of.k)[len(indices) - of.k])
    ties = of.k - int((magnitudes > low).sum())
    chosen = magnitudes > low
    chosen[np.flatnonzero(magnitudes == low)[:ties]] = True
    return indices[chosen]


def _kth(bits: Tensor, k: int) -> int:
    """The k-th largest."""
    return int(torch.kthvalue(bits, len(bits) - k + 1).values)


def _kth_by_bins(v: Tensor, k: int) -> int:
    """The k-th largest magnitude, without a copy of v: its upper 16 bits, then the lower 15."""
    first = 0
    for shift, width in ((15, 16), (0, 15)):
        bins = torch.zeros(1 << width, dtype=torch.int64, device=v.device)
        for s in _pieces(len(v)):
            number = (_magnitudes(v[s]) - first) >> shift
            bins += number[(number >= 0) & (number < len(bins))].bincount(minlength=len(bins))
        above = bins.flip(0).cumsum(0)
        at = int((above < k).sum())  # bins that are above the one in question
        k -= int(above[at - 1]) if at else 0
        first += (len(bins) - 1 - at) << shift
    return first


def _send(x: Tensor, half: bool, exponent: int) -> NDArray[np.uint8]:
    """The values as bytes; x becomes what stays behind."""
    if not half:
        sent = x.cpu().numpy().astype("<f4")
        x.zero_()
    else:
        halves = x.mul(2.0**-exponent).clamp_(-_MOST_HALF, _MOST_HALF).half()
        x.sub_(halves.float().mul_(2.0**exponent))
        sent = halves.cpu().numpy().astype("<f2")
    return sent.view(np.uint8)


def _joined(header: Header, *parts: NDArray[np.uint8]) -> Tensor:
    length = HEADER_BYTES + sum(len(part) for part in parts)
    out = np.empty(length, np.uint8)
    out[:HEADER_BYTES] = np.frombuffer(header.with_length(length).bytes(), np.uint8)
    at = HEADER_BYTES
    for part in parts:
        out[at : at + len(part)] = part
        at += len(part)
    return torch.from_numpy(out)


def _places(of: Header, body: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    if of.dense:
        for s in _pieces(of.n):
            yield s.start, np.arange(s.start, s.stop)
    elif of.count:
        lows = body[of.value_bytes :][: of.low_bytes]
        unary = body[of.value_bytes + of.low_bytes :]
        yield from rice.unpack(lows, unary, of.count, of.shift, of.n)
