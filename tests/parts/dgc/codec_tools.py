"""What the tests of the codec share."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch

from fleetx.parts.dgc import codec, native, payload, plain, rice

CHUNK, BLOCK, PIECE = 64, 16384, 1 << 16  # as in codec.c, and in plain.py
SIZES = [1, 2, 63, 64, 65, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77, PIECE, PIECE + 1, 2 * PIECE + 63, 200_000]
SPARSITIES = [0.0, 0.25, 0.75, 0.9375, 0.984375, 0.996, 0.999]
USUAL = {"momentum": 0.9, "factor": 1.0, "sparsity": 0.999, "half": False}

# Where there is a compiler, a library that is not there is a failure and no reason to skip.
unbuilt = not native.available() and (shutil.which("cc") is None or os.environ.get("FLEETX_KERNELS") == "stock")
built = pytest.mark.skipif(unbuilt, reason=native.reason())
NATIVE, PLAIN = pytest.param(native, marks=built, id="native"), pytest.param(plain, id="plain")
both = pytest.mark.parametrize("way", [NATIVE, PLAIN])
halves = pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])


def tensors(n, kinds=3, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=source) for _ in range(kinds)]


def decoded(way, data, n):
    """What a payload says, by adding it to zeros."""
    out = torch.zeros(n)
    way.decode_add(data, out, 1.0)
    return out.double()


def sent_at(data, n):
    """The indices in it, as numpy reads them."""
    of = codec.header(data)
    if of.dense:
        return np.arange(n)
    body = data.numpy()[payload.HEADER_BYTES :]
    lows, unary = body[of.value_bytes :][: of.low_bytes], body[of.value_bytes + of.low_bytes :]
    found = [indices for _, indices in rice.unpack(lows, unary, of.count, of.shift, n)] if of.count else []
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
