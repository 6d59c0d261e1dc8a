"""The codec without a compiler: torch for the tensors, numpy for the bits. Payloads are identical.

It works in pieces that fit in the cache: no temporary is as large as the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetx.parts.dgc import rice
from fleetx.parts.dgc.payload import HEADER_BYTES, INFINITY_BITS, MAX_HALF, NOT_FINITE, Header, Update
from fleetx.parts.dgc.selection import advance, magnitudes, pieces

_CHUNK = 64  # elements that share a top, which is their largest magnitude
_PIECE = 1 << 16  # elements processed at a time; a multiple of _CHUNK
_pieces = partial(pieces, size=_PIECE)


def encode(update: Update) -> Tensor:
    n, k, half = update.n, update.k, update.half
    tops = _tops(update)
    top = int(tops.max()) if n else 0
    if top >= INFINITY_BITS:
        return _join(Header(n, half, dense=False, finite=False))
    # As in codec.c: scaled so that the largest is in [2**14, 2**15).
    exponent = max((top >> 23) - 127 - 14, -112) if half else 0
    if k == n:
        values = [_extract(update.v_out[s], half, exponent) for s in _pieces(n)]
        return _join(Header(n, half, dense=True, count=n, exponent=exponent), *values)
    # Skip values that would be rounded to zero.
    lowest = int(np.float32(2.0 ** max(exponent - 24, -126)).view(np.int32)) if half else 1
    indices = _largest(update, tops, lowest)
    values = []
    for s in _pieces(len(indices)):
        where = torch.from_numpy(indices[s].astype(np.int64))
        chosen = update.v_out[where]
        values.append(_extract(chosen, half, exponent))
        update.v_out[where] = chosen
        update.u_out[where] = 0
    if not values:
        return _join(Header(n, half, dense=False, exponent=exponent))
    shift, *coded = rice.pack(indices)
    head = Header(n, half, dense=False, count=len(indices), shift=shift, exponent=exponent)
    return _join(head, *values, *coded)


def decode_add(head: Header, data: Tensor, out: Tensor, scale: float) -> None:
    body = data.numpy()[HEADER_BYTES:]
    values = body[: head.value_bytes].view(np.dtype("<f2" if head.half else "<f4"))
    # Check everything before the first change.
    for s in _pieces(head.count):
        if not np.isfinite(values[s]).all():
            raise ValueError(NOT_FINITE)
    for _ in _indices(head, body):
        pass
    # In float64, where the product of two floats is exact: see decode.c.
    factor = float(np.float32(scale)) * 2.0**head.exponent
    for first, indices in _indices(head, body):
        added = torch.from_numpy(values[first : first + len(indices)].astype(np.float64) * factor)
        where = torch.from_numpy(indices)
        out[where] = (out[where].double() + added).float()


def _tops(update: Update) -> Tensor:
    """Update u and v. Returns the top of each chunk of v."""
    factor, limit = update.factor, update.norm_limit
    if limit is not None:
        norm = abs(factor) * math.sqrt(sum(float(update.g[s].double().square().sum()) for s in _pieces(update.n)))
        factor *= limit / norm if limit < norm < math.inf else 1.0
    tops = torch.zeros(-(-update.n // _CHUNK), dtype=torch.int32)
    for s, bits in advance(update, factor, _PIECE):
        whole = len(bits) // _CHUNK * _CHUNK
        first = s.start // _CHUNK
        tops[first : first + whole // _CHUNK] = bits[:whole].view(-1, _CHUNK).amax(1)
        if whole < len(bits):
            tops[-1] = bits[whole:].amax()
    return tops


def _largest(update: Update, tops: Tensor, lowest: int) -> NDArray[np.uint32]:
    """The sorted indices of the k largest that are at least `lowest`; of equal ones, the first.

    If the k-th largest top is t, the k largest are in chunks whose top is at least t.
    """
    k = update.k
    low = int(torch.kthvalue(tops, len(tops) - k + 1).values) if k <= len(tops) else _kth_largest(update.v_out, k)
    low = max(low, lowest)
    found, sizes = [], []
    for s in _pieces(update.n):
        if int(tops[s.start // _CHUNK : -(-s.stop // _CHUNK)].amax()) < low:
            continue
        bits = magnitudes(update.v_out[s])
        where = (bits >= low).nonzero().view(-1)
        sizes.append(bits[where].numpy())
        found.append((where.numpy() + s.start).astype(np.uint32))
    if not found:
        return np.zeros(0, np.uint32)
    indices, largest = np.concatenate(found), np.concatenate(sizes)
    if len(indices) <= k:
        return indices
    low = int(np.partition(largest, len(indices) - k)[len(indices) - k])
    ties = k - int((largest > low).sum())
    chosen = largest > low
    chosen[np.flatnonzero(largest == low)[:ties]] = True
    return indices[chosen]


def _kth_largest(v: Tensor, k: int) -> int:
    """The k-th largest magnitude, by two histograms instead of a copy of v: its upper 16 bits, then the lower 15."""
    first = 0
    for shift, width in ((15, 16), (0, 15)):
        bins = torch.zeros(1 << width, dtype=torch.int64)
        for s in _pieces(len(v)):
            number = (magnitudes(v[s]) - first) >> shift
            bins += number[(number >= 0) & (number < len(bins))].bincount(minlength=len(bins))
        above = bins.flip(0).cumsum(0)
        at = int((above < k).sum())  # number of bins above the one with the k-th
        k -= int(above[at - 1]) if at else 0
        first += (len(bins) - 1 - at) << shift
    return first


def _extract(x: Tensor, half: bool, exponent: int) -> NDArray[np.uint8]:
    """The values as bytes. Leaves the rounding errors in x."""
    if not half:
        sent = x.numpy().astype("<f4")
        x.zero_()
    else:
        halves = x.mul(2.0**-exponent).clamp_(-MAX_HALF, MAX_HALF).half()
        x.sub_(halves.float().mul_(2.0**exponent))
        sent = halves.numpy().astype("<f2")
    return sent.view(np.uint8)


def _join(head: Header, *parts: NDArray[np.uint8]) -> Tensor:
    length = HEADER_BYTES + sum(len(part) for part in parts)
    start = np.frombuffer(replace(head, length=length).bytes(), np.uint8)
    return torch.from_numpy(np.concatenate([start, *parts]))


def _indices(head: Header, body: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The indices in pieces, each with the number of indices before it."""
    if head.dense:
        for s in _pieces(head.n):
            yield s.start, np.arange(s.start, s.stop)
    elif head.count:
        lows = body[head.value_bytes :][: head.low_bytes]
        unary = body[head.value_bytes + head.low_bytes :]
        yield from rice.unpack(lows, unary, head.count, head.shift, head.n)
