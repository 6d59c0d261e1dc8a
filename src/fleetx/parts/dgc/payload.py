"""The format of a payload, and the arguments of the two encoders.

    header   24 bytes, little-endian: see `Header`
    values   `count` of them, in the order of their indices: fp32, or fp16 times 2**exponent
    indices  absent from a dense payload, which holds every value. The gaps between neighbouring indices in Rice code
             with parameter `shift`: first the low `shift` bits of all gaps, then all quotients in unary, as zeros
             followed by a one. Bits are filled from the lowest, and both parts are padded to whole bytes.

The two parts of each code word are stored separately so that numpy can decode them without a loop. Indices count
elements in memory order.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

_LAYOUT = struct.Struct("<2sBBBbHIIQ")  # magic, version, flags, shift, exponent, reserved, n, count, length
_MAGIC, _VERSION = b"FX", 1
_HALF, _DENSE, _OVERFLOWED = 1, 2, 4
_MAX_ELEMENTS = 2**32 - 1
_EXPONENTS = range(-112, 114)

HEADER_BYTES = _LAYOUT.size
MAX_SHIFT = 31
MAX_HALF = 32752.0  # just below 2**15: see codec.c
INFINITY_BITS = 0x7F800000

SHORT = "the payload is truncated: it has fewer indices than values"
LONG = "the payload is too long: it continues after the last index"
BEYOND = "the payload has an index beyond the end of the tensor"
NOT_FINITE = "the payload has a value that is not finite"


@dataclass(frozen=True)
class Header:
    n: int  # elements of the tensor
    half: bool
    dense: bool
    finite: bool = True  # if not, the payload has no values
    count: int = 0  # number of values
    shift: int = 0
    exponent: int = 0
    length: int = HEADER_BYTES  # of the payload, in bytes

    def bytes(self) -> bytes:
        flags = _HALF * self.half | _DENSE * self.dense | _OVERFLOWED * (not self.finite)
        numbers = (self.shift, self.exponent, 0, self.n, self.count, self.length)
        return _LAYOUT.pack(_MAGIC, _VERSION, flags, *numbers)

    @property
    def value_bytes(self) -> int:
        return self.count * (2 if self.half else 4)

    @property
    def low_bytes(self) -> int:
        return (self.count * self.shift + 7) // 8


def header(payload: Tensor) -> Header:
    """Read and check the header. Other payloads may follow in the same buffer: `length` tells where this one ends."""
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise ValueError("a payload must be a contiguous one-dimensional uint8 tensor")
    start = bytes(payload[:HEADER_BYTES].tolist())
    if len(start) < HEADER_BYTES:
        raise ValueError(f"the payload is truncated: {len(start)} bytes are too few for a header")
    magic, version, flags, shift, exponent, reserved, n, count, length = _LAYOUT.unpack(start)
    if magic != _MAGIC or version != _VERSION or flags >= 2 * _OVERFLOWED or reserved:
        raise ValueError(f"not a payload of version {_VERSION}: it starts with {start[:8].hex()}")
    half, dense, finite = bool(flags & _HALF), bool(flags & _DENSE), not flags & _OVERFLOWED
    head = Header(n, half, dense, finite, count, shift, exponent, length)
    if length > payload.numel():
        raise ValueError(f"the payload is truncated: {payload.numel()} bytes of {length}")
    body = head.value_bytes + head.low_bytes
    length_ok = length == HEADER_BYTES + body if dense or not count else length > HEADER_BYTES + body
    count_ok = count == (n if dense else min(count, n)) if finite else count == 0
    exponent_ok = exponent in _EXPONENTS if half else exponent == 0
    if not (length_ok and count_ok and exponent_ok and shift <= MAX_SHIFT and not (dense and shift)):
        raise ValueError(f"the header of the payload is inconsistent: {head}")
    return head


def wanted(n: int, sparsity: float) -> int:
    """Maximum number of values to send."""
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity={sparsity}: must be at least 0 and less than 1")
    return min(n, max(1, int(n * (1 - sparsity))))


def room(n: int, k: int, half: bool) -> int:
    """Bytes that are enough for any payload of at most k values.

    With the parameter floor(log2(n / count)), a gap takes that many bits, plus one, plus two on average for its
    quotient; the best parameter takes no more. One bit is added because count may be less than k.
    """
    bits = k * ((n // k).bit_length() + 3) if k < n else 0
    return HEADER_BYTES + k * (2 if half else 4) + bits // 8 + 8


def flat(tensor: Tensor, name: str) -> Tensor:
    if tensor.dtype != torch.float32 or tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{name} must be fp32 and contiguous: pass a flat view of its memory")
    if tensor.numel() > _MAX_ELEMENTS:
        raise ValueError(f"{name} has {tensor.numel()} elements, but a payload supports only {_MAX_ELEMENTS}: split it")
    return tensor.detach().view(-1)


@dataclass(frozen=True)
class Update:
    """The arguments of `codec.encode`, checked, with flat tensors."""

    g: Tensor
    u: Tensor
    v: Tensor
    u_out: Tensor  # may be u
    v_out: Tensor  # may be v
    momentum: float
    factor: float
    decay: float
    norm_limit: float | None
    half: bool
    k: int
    p: Tensor | None = None  # with decay only

    @property
    def n(self) -> int:
        return self.g.numel()
