"""Helpers for the tests of the codec."""

from __future__ import annotations

import os
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import covering
from fleetx.parts.dgc import codec, native, payload, plain, rice

CHUNK, BLOCK, PIECE = 64, 16384, 1 << 16  # as in codec.c and plain.py
SPARSITIES = [0.0, 0.25, 0.984375, 0.999]  # dense, more values than chunks, as many, fewer
USUAL = {"momentum": 0.9, "factor": 1.0, "sparsity": 0.999, "half": False}
HALF = [False, True]

# With a compiler, a missing library is a failure and not a reason to skip.
unbuilt = not native.available() and (shutil.which("cc") is None or os.environ.get("FLEETX_KERNELS") == "foreach")
built = pytest.mark.skipif(unbuilt, reason=native.reason())


def backend(module):
    return SimpleNamespace(
        name=module.__name__.rpartition(".")[2],
        encode=partial(codec.encode, backend=module),
        decode_add=partial(codec.decode_add, backend=module),
    )


NATIVE, PLAIN = backend(native), backend(plain)
BACKENDS = [NATIVE, PLAIN]


cases = partial(covering.cases, marks=lambda value: [built] if value is NATIVE else [])


both = cases(backend=BACKENDS)


def tensors(n, kinds=3, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=source) for _ in range(kinds)]


def zeros(n):
    return torch.zeros(n), torch.zeros(n)


def decoded(backend, data, n):
    """The content of a payload, added to zeros."""
    out = torch.zeros(n)
    backend.decode_add(data, out, 1.0)
    return out.double()


def sent_at(data, n):
    """The indices in a payload, decoded with numpy."""
    head = codec.header(data)
    if head.dense:
        return np.arange(n)
    body = data.numpy()[payload.HEADER_BYTES :]
    lows, unary = body[head.value_bytes :][: head.low_bytes], body[head.value_bytes + head.low_bytes :]
    pieces = [indices for _, indices in rice.unpack(lows, unary, head.count, head.shift, n)] if head.count else []
    return np.concatenate([np.zeros(0, np.int64), *pieces])


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
