"""What a payload looks like, and what both ways of making one agree on.

    header   24 bytes, little-endian: see `Header`
    values   count of them, in the order of their indices: fp32, or fp16 times 2**exponent
    indices  not in the dense form, in which every value is sent. The gaps between neighbours in Rice code with the
             parameter `shift`: first the low `shift` bits of all gaps, then all quotients, each as so many zero bits
             and a one. Bits are filled from the lowest on, both parts to whole bytes.

The two halves of each code word lie apart so that numpy can read them without a loop. Indices count in memory order.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_LAYOUT = struct.Struct("<2sBBBbHIIQ")  # what it is, version, flags, shift, exponent, nothing, n, count, length
_WHAT, _VERSION = b"FX", 1
_HALF, _DENSE, _NOT_FINITE = 1, 2, 4
_MOST = 2**32 - 1  # elements of a tensor
_EXPONENTS = range(-112, 114)

HEADER_BYTES = _LAYOUT.size
MOST_SHIFT = 31

SHORT = "the payload is truncated: its indices end before its values"
LONG = "the payload is too long: its indices end before it does"
BEYOND = "the payload has an index beyond the tensor"
BAD_VALUE = "the payload has a value that is not finite"


@dataclass(frozen=True)
class Header:
    n: int  # elements of the tensor
    half: bool
    dense: bool
    finite: bool = True  # if not, nothing else is in the payload
    count: int = 0  # values that are sent
    shift: int = 0
    exponent: int = 0
    length: int = HEADER_BYTES  # of the whole payload, in bytes

    def bytes(self) -> bytes:
        flags = _HALF * self.half | _DENSE * self.dense | _NOT_FINITE * (not self.finite)
        numbers = (self.shift, self.exponent, 0, self.n, self.count, self.length)
        return _LAYOUT.pack(_WHAT, _VERSION, flags, *numbers)

    def with_length(self, length: int) -> Header:
        return replace(self, length=length)

    @property
    def value_bytes(self) -> int:
        return self.count * (2 if self.half else 4)

    @property
    def low_bytes(self) -> int:
        return (self.count * self.shift + 7) // 8


def header(payload: Tensor) -> Header:
    """Read and check it. More may follow the payload, as in a buffer of several: `length` tells where it ends."""
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise ValueError("a payload is a contiguous uint8 tensor of one dimension")
    start = bytes(payload[:HEADER_BYTES].tolist())
    if len(start) < HEADER_BYTES:
        raise ValueError(f"the payload is truncated: {len(start)} bytes are less than a header")
    what, version, flags, shift, exponent, nothing, n, count, length = _LAYOUT.unpack(start)
    if what != _WHAT or version != _VERSION or flags >= 2 * _NOT_FINITE or nothing:
        raise ValueError(f"this is no payload of version {_VERSION}: it begins with {start[:8].hex()}")
    half, dense, finite = bool(flags & _HALF), bool(flags & _DENSE), not flags & _NOT_FINITE
    out = Header(n, half, dense, finite, count, shift, exponent, length)
    if length > payload.numel():
        raise ValueError(f"the payload is truncated: {payload.numel()} bytes of {length}")
    body = out.value_bytes + out.low_bytes
    fits = length == HEADER_BYTES + body if dense or not count else length > HEADER_BYTES + body
    counts = count == (n if dense else min(count, n)) if finite else count == 0
    scaled = exponent in _EXPONENTS if half else exponent == 0
    if not (fits and counts and scaled and shift <= MOST_SHIFT and not (dense and shift)):
        raise ValueError(f"the header of the payload contradicts itself: {out}")
    return out


def for_tensor(payload: Tensor, out: Tensor) -> Header:
    """The header of a payload that is to be added to `out`."""
    of = header(payload)
    flat(out, "out")
    if of.n != out.numel():
        raise ValueError(f"the payload is of a tensor of {of.n} elements, not of {out.numel()}")
    if of.length != payload.numel():
        raise ValueError(f"the payload is of {of.length} bytes, and {payload.numel()} were given")
    if not of.finite:
        raise ValueError("the payload says that the gradient was not finite: there is nothing to add; skip the step")
    return of


def wanted(n: int, sparsity: float) -> int:
    """How many values are sent, at most."""
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity={sparsity}: must be at least 0 and less than 1")
    return min(n, max(1, int(n * (1 - sparsity))))


def room(n: int, k: int, half: bool) -> int:
    """Bytes that are enough for any payload of at most k values.

    With the parameter log2(n / count), rounded down, a gap takes that many bits, one more, and two on the average for
    its quotient; the best parameter takes no more. One more bit, as count may be less than k.
    """
    bits = k * ((n // k).bit_length() + 3) if k < n else 0
    return HEADER_BYTES + k * (2 if half else 4) + bits // 8 + 8


def flat(tensor: Tensor, name: str) -> Tensor:
    if tensor.dtype != torch.float32 or tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{name} must be fp32 and contiguous: pass what lies in its memory as a flat tensor")
    if tensor.numel() > _MOST:
        raise ValueError(f"{name} has {tensor.numel()} elements, and a payload can have {_MOST}: divide it")
    return tensor.detach().view(-1)


@dataclass(frozen=True)
class Update:
    """The arguments of `encode`, checked, and flat."""

    g: Tensor
    u: Tensor
    v: Tensor
    p: Tensor | None
    u_out: Tensor
    v_out: Tensor
    k: int

    @property
    def n(self) -> int:
        return self.g.numel()


def update(
    g: Tensor,
    u: Tensor,
    v: Tensor,
    *,
    sparsity: float,
    decay: float,
    p: Tensor | None,
    u_out: Tensor | None,
    v_out: Tensor | None,
    norm_limit: float | None,
) -> Update:
    if (u_out is None) != (v_out is None):
        raise ValueError("u_out and v_out come together, or not at all")
    if decay and p is None:
        raise ValueError(f"decay={decay} needs the parameter: pass p")
    if norm_limit is not None and not 0 < norm_limit < float("inf"):
        raise ValueError(f"norm_limit={norm_limit}: must be positive, or None for no limit")
    named = {"g": g, "u": u, "v": v, "p": p if decay else None, "u_out": u_out, "v_out": v_out}
    given = {name: flat(tensor, name) for name, tensor in named.items() if tensor is not None}
    for name, tensor in given.items():
        if tensor.shape != given["g"].shape or tensor.device != g.device:
            where = f"{tensor.numel()} elements on {tensor.device}"
            raise ValueError(f"{name} has {where}, but the gradient {g.numel()} on {g.device}")
    return Update(
        given["g"],
        given["u"],
        given["v"],
        given.get("p"),
        given.get("u_out", given["u"]),
        given.get("v_out", given["v"]),
        wanted(g.numel(), sparsity),
    )
