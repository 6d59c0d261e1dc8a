"""The codec of codec.c, for fp32 tensors in host memory. Other threads of Python run meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fleetx.base.compiled import Library
from fleetx.parts.dgc import payload as form
from fleetx.parts.dgc.payload import HEADER_BYTES, Header

_library = Library(
    Path(__file__).with_name("_codec"),
    fleetx_encode="n" + "p" * 6 + "d" * 4 + "nippi" + ":n",
    fleetx_decode_add="pnniiiipndi",
)
available, reason = _library.available, _library.reason

_WRONG = {-2: form.SHORT, -3: form.LONG, -4: form.BEYOND, -5: form.BAD_VALUE}  # as in decode.c


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
    _in_host_memory(of.g, "g")
    n, k = of.n, of.k
    out = torch.empty(form.room(n, k, half), dtype=torch.uint8)
    found = np.zeros(4, np.int64)
    tensors = (of.g, of.u, of.v, of.p, of.u_out, of.v_out)
    length = _library.loaded().fleetx_encode(
        n,
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(momentum, factor, decay, norm_limit or 0.0),
        *(k, half, out.data_ptr() + HEADER_BYTES, found.ctypes.data, torch.get_num_threads()),
    )
    if length < 0:
        raise MemoryError(f"no memory to compress a gradient of {n} elements")
    # torch cannot see that they have changed.
    increment_version([of.u_out, of.v_out])
    count, finite, shift, exponent = found.tolist()
    length += HEADER_BYTES
    header = Header(n, half, k == n and bool(finite), bool(finite), count, shift, exponent, length)
    out[:HEADER_BYTES] = torch.frombuffer(bytearray(header.bytes()), dtype=torch.uint8)
    return out[:length]


def decode_add(payload: Tensor, out: Tensor, scale: float) -> None:
    of = form.for_tensor(payload, out)
    _in_host_memory(payload, "payload")
    _in_host_memory(out, "out")
    failed = _library.loaded().fleetx_decode_add(
        *(payload.data_ptr() + HEADER_BYTES, of.length - HEADER_BYTES),
        *(of.count, of.half, of.dense, of.shift, of.exponent),
        *(out.data_ptr(), of.n, scale, torch.get_num_threads()),
    )
    if failed:
        raise ValueError(_WRONG[failed])
    increment_version([out])


def _in_host_memory(tensor: Tensor, name: str) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}: the compiled codec is for the CPU")
