"""The compiled codec against the one in torch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fleetx.parts import _blocks
from fleetx.parts._blocks import decode, decode_add, encode, encode_in_place, native


def values(block, bits):
    """Enough of the largest blocks for three threads."""
    x = torch.randn(2100, block) * torch.logspace(-38, 38, 2100).unsqueeze(1)
    x[3], x[7] = 0, 1e-42  # zeros, denormals
    x[8] = torch.arange(block) % 6 - 2.5  # ties, because the scale is 1
    x[8, -1] = 2 ** (bits - 1) - 1
    x[5, 1], x[6, 0] = float("nan"), -float("inf")
    return x


def everything(block, bits):
    x = values(block, bits)
    rows, kept = encode(x, bits), x.clone()
    total = torch.ones_like(x)
    decode_add(rows, bits, total)
    found = [rows, encode(x, bits, torch.Generator().manual_seed(3)), encode_in_place(kept, bits)]
    return [*found, kept, decode(rows, bits, torch.float32), total]


@pytest.mark.skipif(not native._library.available(), reason=native._library.reason())
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("block", [2, 6, 256])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_it_makes_the_same_bits(monkeypatch, bits, block, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    compiled = everything(block, bits)
    monkeypatch.setattr(_blocks.native, "fits", lambda values: False)
    torch.manual_seed(0)
    for ours, plain in zip(compiled, everything(block, bits), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)


def test_only_fp32_on_the_host_is_compiled(monkeypatch):
    assert not native.fits(torch.zeros(2, 2, dtype=torch.float64))
    assert not native.fits(torch.zeros(2, 2, device="meta"))
    monkeypatch.setenv("FLEETX_KERNELS", "foreach")
    assert not native.fits(torch.zeros(2, 2))
