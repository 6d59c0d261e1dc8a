"""Deep gradient compression (Lin et al. 2018) of one tensor: a gradient becomes a payload, a payload is added.

u = momentum * u + factor * g (+ decay * p)    v = v + u
the k largest |v| are sent; what was sent leaves v, and u is zero there (momentum factor masking)

payload.py   what a payload looks like; the arguments
native.py    the compiled codec (codec.c, decode.c, wire.h): fp32 on the CPU
plain.py     the same with torch and numpy; rice.py: the indices
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from fleetx.parts.dgc import native, plain
from fleetx.parts.dgc.payload import Header, header

__all__ = ["Header", "decode_add", "encode", "header"]


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
    """Take in a gradient and take out the k = int(n * (1 - sparsity)) largest values, at least one, as a payload.

    All tensors are fp32, contiguous and of the same size. The selection is exact: never more than k, and fewer only
    if there are not k that are not zero, or in 16 bits, that would not be zero (2**-38 of the largest, or less).
    Of values that are equal the first are sent, the others next time.

    half: values are sent in 16 bits, and what that rounds off stays in v: v is exactly what was not sent.
    u_out, v_out: the new u and v go there, and the old ones are untouched, for a step that may be taken back.
    norm_limit: a gradient for which |factor * g| is more is first scaled down to it.

    If k is n, as at sparsity 0, everything is sent, and u is not masked: the mask takes away momentum that would push
    twice, and where nothing was left behind there is none. So sparsity 0 is plain momentum SGD.

    If a number is nan or infinite, or v would be, the payload says so: `header(payload).finite`, and holds no values.
    Then the new u and v are worth nothing, so a caller that wants to skip such a step needs u_out and v_out.
    """
    return _way(g).encode(
        g, u, v, momentum=momentum, factor=factor, sparsity=sparsity, half=half, decay=decay, p=p, u_out=u_out,
        v_out=v_out, norm_limit=norm_limit,
    )  # fmt: skip


def decode_add(payload: Tensor, out: Tensor, scale: float) -> None:
    """out[i] += scale * value for every value of the payload, to the same bits on every machine.

    A payload that `encode` cannot have made for a tensor of this size is a ValueError, and `out` is as before.
    """
    _way(out).decode_add(payload, out, scale)


def _way(tensor: Tensor) -> ModuleType:
    return native if tensor.device.type == "cpu" and native.available() else plain
