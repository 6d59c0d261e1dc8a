"""Rice coding of indices with numpy. payload.py describes the bits; codec.c and decode.c do the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fleetx.parts.dgc.payload import BEYOND, LONG, MAX_SHIFT, SHORT

_PIECE = 1 << 14  # gaps processed at a time; a multiple of 8, so that the low bits of a piece fill whole bytes


def pack(indices: NDArray[np.uint32]) -> tuple[int, NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns the parameter, the low bits and the quotients."""
    gaps = indices.copy()
    gaps[1:] -= indices[:-1] + np.uint32(1)
    shift = best_shift(gaps)
    lows = [_low_bits(gaps[start : start + _PIECE], shift) for start in range(0, len(gaps), _PIECE)]
    unary = np.zeros((_quotients(gaps, shift) + len(gaps) + 7) // 8, np.uint8)
    at = 0
    for start in range(0, len(gaps), _PIECE):
        ends = at + np.cumsum((gaps[start : start + _PIECE] >> shift).astype(np.int64) + 1)
        first, at = at // 8, int(ends[-1])
        bits = np.zeros(at - 8 * first, np.uint8)
        bits[ends - 1 - 8 * first] = 1
        unary[first : (at + 7) // 8] |= np.packbits(bits, bitorder="little")
    return shift, np.concatenate(lows) if lows else np.zeros(0, np.uint8), unary


def best_shift(gaps: NDArray[np.uint32]) -> int:
    """The smallest parameter with the fewest bits in total: shift + 1 per gap, plus the quotients.

    The total is convex in the parameter, so the search goes downhill from log2 of the mean gap.
    """
    count = max(len(gaps), 1)
    shift = min(max((_quotients(gaps, 0) // count).bit_length() - 1, 0), MAX_SHIFT)
    here, start = _quotients(gaps, shift), shift
    while shift > 0 and (other := _quotients(gaps, shift - 1)) - count <= here:
        shift, here = shift - 1, other
    while shift >= start and shift < MAX_SHIFT and (other := _quotients(gaps, shift + 1)) + count < here:
        shift, here = shift + 1, other
    return shift


def unpack(
    lows: NDArray[np.uint8], unary: NDArray[np.uint8], count: int, shift: int, n: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The indices in pieces, each with the number of indices before it. Raises unless there are `count` below n."""
    seen, index, last = 0, -1, -1
    for start in range(0, len(unary), _PIECE // 8):
        ones = np.flatnonzero(np.unpackbits(unary[start : start + _PIECE // 8], bitorder="little")) + 8 * start
        ones = ones[: count - seen]
        if not len(ones):
            continue
        quotients = np.diff(ones, prepend=last) - 1
        if quotients.max() > n >> shift:
            raise ValueError(BEYOND)
        gaps = (quotients << shift) + _read_low_bits(lows, seen, len(ones), shift)
        indices = index + np.cumsum(gaps + 1)
        index, last = int(indices[-1]), int(ones[-1])
        if index >= n:
            raise ValueError(BEYOND)
        yield seen, indices
        seen += len(ones)
    if seen < count:
        raise ValueError(SHORT)
    if 8 * len(unary) - (last + 1) >= 8:
        raise ValueError(LONG)


def _quotients(gaps: NDArray[np.uint32], shift: int) -> int:
    pieces = (gaps[start : start + _PIECE] for start in range(0, len(gaps), _PIECE))
    return sum(int((piece >> shift).sum(dtype=np.int64)) for piece in pieces)


def _low_bits(gaps: NDArray[np.uint32], shift: int) -> NDArray[np.uint8]:
    bits = gaps[:, None] >> np.arange(shift, dtype=np.uint32)
    return np.packbits((bits & 1).astype(np.uint8), bitorder="little")


def _read_low_bits(lows: NDArray[np.uint8], first: int, count: int, shift: int) -> NDArray[np.int64]:
    """Read `count` numbers of `shift` bits, starting with number `first`."""
    if shift == 0:
        return np.zeros(count, np.int64)
    start, end = first * shift // 8, ((first + count) * shift + 7) // 8
    read = np.zeros(end - start + 8, np.int64)  # padded, because the last number may start in the last byte
    read[: end - start] = lows[start:end]
    at = np.arange(first, first + count) * shift - 8 * start
    words = sum(read[at // 8 + i] << 8 * i for i in range(5))  # up to 31 bits, after up to 7 bits of another number
    return words >> at % 8 & (1 << shift) - 1
