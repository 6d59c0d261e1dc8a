"""The compiled codec, for fp32 tensors in host memory. It releases the GIL."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fleetx.base.compiled import Library
from fleetx.parts.dgc import payload
from fleetx.parts.dgc.payload import HEADER_BYTES, Header, Update

_library = Library(
    Path(__file__).with_name("_codec"),
    fleetx_encode="n" + "p" * 6 + "d" * 4 + "nippi" + ":n",
    fleetx_decode_add="pnniiiipndi",
)
available, reason = _library.available, _library.reason

_ERRORS = {-2: payload.SHORT, -3: payload.LONG, -4: payload.BEYOND, -5: payload.NOT_FINITE}  # as in decode.c


def encode(update: Update) -> Tensor:
    n, k, half = update.n, update.k, update.half
    out = torch.empty(payload.room(n, k, half), dtype=torch.uint8)
    result = np.zeros(4, np.int64)
    tensors = (update.g, update.u, update.v, update.p, update.u_out, update.v_out)
    length = _library.loaded().fleetx_encode(
        n,
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(update.momentum, update.factor, update.decay, update.norm_limit or 0.0),
        *(k, half, out.data_ptr() + HEADER_BYTES, result.ctypes.data, torch.get_num_threads()),
    )
    if length < 0:
        raise MemoryError(f"not enough memory to compress a gradient of {n} elements")
    increment_version([update.u_out, update.v_out])  # torch does not see the change
    count, finite, shift, exponent = result.tolist()
    length += HEADER_BYTES
    head = Header(n, half, k == n and bool(finite), bool(finite), count, shift, exponent, length)
    out[:HEADER_BYTES] = torch.frombuffer(bytearray(head.bytes()), dtype=torch.uint8)
    return out[:length]


def decode_add(head: Header, data: Tensor, out: Tensor, scale: float) -> None:
    error = _library.loaded().fleetx_decode_add(
        *(data.data_ptr() + HEADER_BYTES, head.length - HEADER_BYTES),
        *(head.count, head.half, head.dense, head.shift, head.exponent),
        *(out.data_ptr(), head.n, scale, torch.get_num_threads()),
    )
    if error:
        raise ValueError(_ERRORS[error])
    increment_version([out])
