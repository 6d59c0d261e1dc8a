"""Deep gradient compression (Lin et al. 2018) of one tensor: turn a gradient into a payload, and add a payload.

u = momentum * u + factor * g (+ decay * p)    v = v + u
The k largest |v| are sent. Where a value was sent, v keeps only what was rounded off, and u is zero (momentum factor
masking).
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from fleetx.parts.dgc import native, on_device, plain, selection
from fleetx.parts.dgc.payload import Header, Update, flat, header, wanted

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
    backend: ModuleType | None = None,
) -> Tensor:
    """Add a gradient to u and v, and extract the k = max(1, int(n * (1 - sparsity))) largest values as a payload.

    All tensors must be fp32, contiguous and of the same size. The selection is exact: never more than k, and fewer only
    if fewer are nonzero (with `half`, nonzero after rounding, that is, above 2**-38 of the largest). Of equal values,
    those with the lowest indices are sent first.

    half: send values in 16 bits. The rounding error stays in v, so that v is exactly what was not sent.
    u_out, v_out: where to write the new u and v, leaving the old ones unchanged, for a step that may be undone.
    norm_limit: if |factor * g| is larger, scale the gradient down to it.
    backend: native or plain; by default the fastest that works. On an accelerator, returns a message (on_device.py).

    If k is n, as with sparsity 0, everything is sent and u is not masked: masking removes momentum that would be
    applied twice, and here nothing is left to apply again. So sparsity 0 is SGD with momentum.

    If any number is nan or infinite, `header(payload).finite` is false, and the payload holds no values. The new u and
    v are then invalid, so pass u_out and v_out to be able to skip such a step.
    """
    if (u_out is None) != (v_out is None):
        raise ValueError("u_out and v_out must be passed together")
    if decay and p is None:
        raise ValueError(f"decay={decay} needs the parameter: pass p")
    if norm_limit is not None and not 0 < norm_limit < float("inf"):
        raise ValueError(f"norm_limit={norm_limit}: must be positive and finite, or None")
    named = {"g": g, "u": u, "v": v, "p": p if decay else None, "u_out": u_out, "v_out": v_out}
    given = {name: flat(tensor, name) for name, tensor in named.items() if tensor is not None}
    for name, tensor in given.items():
        if tensor.shape != given["g"].shape or tensor.device != g.device:
            where = f"{tensor.numel()} elements on {tensor.device}"
            raise ValueError(f"{name} has {where}, but the gradient has {g.numel()} on {g.device}")
    given = {"u_out": given["u"], "v_out": given["v"]} | given
    update = Update(
        **given, momentum=momentum, factor=factor, decay=decay, norm_limit=norm_limit, half=half,
        k=wanted(g.numel(), sparsity),
    )  # fmt: skip
    payload: Tensor = (backend or _backend(g)).encode(update)
    return payload


def decode_add(
    payload: Tensor, out: Tensor, scale: float, *, head: Header | None = None, backend: ModuleType | None = None
) -> None:
    """out[i] += scale * value for every value in the payload, with bitwise identical results on every machine.

    head: `header(payload)`, if it has been read already.

    Raises ValueError, without changing `out`, for a payload that `encode` cannot have made for a tensor of this size.
    """
    head, values = head or header(payload), flat(out, "out")
    if head.n != out.numel():
        raise ValueError(f"the payload is for a tensor of {head.n} elements, not {out.numel()}")
    if head.length != payload.numel():
        raise ValueError(f"the payload should have {head.length} bytes, but has {payload.numel()}")
    if not head.finite:
        raise ValueError("the gradient in the payload was not finite: there is nothing to add, so skip the step")
    (backend or _backend(out)).decode_add(head, payload, values, scale)


def _backend(tensor: Tensor) -> ModuleType:
    if tensor.device.type != "cpu":
        return on_device
    return native if native.available() else plain


def kernels_remark(device: torch.device) -> str:
    """Which implementation selects values on this device, and why not a faster one, for `explain`."""
    name, reason = ("compiled codec", native.reason()) if device.type == "cpu" else ("Triton", selection.reason(device))
    return f"selection on {device}: torch ({reason})" if reason else f"selection on {device}: {name}"
