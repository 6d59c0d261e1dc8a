"""Which values DGC sends, compared with a sort; and that the result does not depend on how it is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_tools import (
    BACKENDS,
    BLOCK,
    HALF,
    NATIVE,
    PIECE,
    PLAIN,
    SPARSITIES,
    USUAL,
    both,
    built,
    cases,
    decoded,
    same_bits,
    sent_at,
    tensors,
    zeros,
)

from fleetx.parts.dgc import codec, payload


def gaussian(n):
    return tensors(n, 1)[0]


def heavy_tailed(n):
    return tensors(n, 1)[0].double().pow(15).mul(1e-3).float()


def a_few_huge(n):
    x = tensors(n, 1)[0] * 1e-3
    x[:: n // 5] = 1e30
    return x


def clustered(n):
    """Like an embedding: all large values are next to each other."""
    x = tensors(n, 1)[0] * 1e-6
    x[n // 2 : n // 2 + n // 50] *= 1e6
    return x


def constant(n):
    return torch.full((n,), -0.25)


def many_equal(n):
    return torch.randint(-3, 4, (n,)).float()


def tiny(n):
    return tensors(n, 1)[0] * 1e-36


@cases(make=[gaussian, heavy_tailed, a_few_huge, clustered, constant, many_equal, tiny], n=[20_000, 150_000],
       sparsity=[0.25, 0.9375, 0.999], half=HALF, backend=BACKENDS)  # fmt: skip
def test_the_largest_are_sent_for_any_distribution(make, n, sparsity, half, backend):
    x, (u, v) = make(n), zeros(n)
    data = backend.encode(x, u, v, momentum=0.9, factor=1.0, sparsity=sparsity, half=half)
    where, k = sent_at(data, n), payload.wanted(n, sparsity)
    magnitudes = x.double().abs().numpy()
    # The smallest value that 16 bits can represent next to the largest. Denormals may be flushed to zero.
    least = 2.0 ** max(np.floor(np.log2(magnitudes.max())) - 38 if half else -126, -126)
    assert min(k, (magnitudes >= least).sum()) <= len(where) <= min(k, (magnitudes > 0).sum())
    # Stable, so that of equal values the first are sent.
    assert np.array_equal(where, np.sort(np.argsort(-magnitudes, kind="stable")[: len(where)]))


@both
def test_equal_values_are_all_sent_in_turn(backend):
    n = 64_000
    g, (u, v) = torch.ones(n), zeros(n)
    turns = []
    for _ in range(4):
        data = backend.encode(g, u, v, momentum=0.0, factor=1.0, sparsity=0.75, half=True)
        turns.append(sent_at(data, n))
        g = torch.zeros(n)
    assert np.array_equal(np.concatenate(turns), np.arange(n))
    assert not v.any()


@cases(sparsity=[0.0, 0.25, 0.999], half=HALF, backend=BACKENDS)
def test_zeros_are_sent_only_if_everything_is(sparsity, half, backend):
    data = backend.encode(torch.zeros(20_000), *zeros(20_000), **USUAL | {"sparsity": sparsity, "half": half})
    assert codec.header(data).count == (0 if sparsity else 20_000)
    assert codec.header(data).finite
    assert not decoded(backend, data, 20_000).any()


@cases(scale=[1e-35, 1e-20, 1e-8, 1.0, 7e4, 1e20, 1e37], sparsity=[0.0, 0.99], backend=BACKENDS)
def test_sixteen_bits_have_the_precision_but_not_the_range_of_fp16(scale, sparsity, backend):
    (g,) = tensors(20_000, 1)
    g *= scale
    u, v = zeros(20_000)
    data = backend.encode(g, u, v, momentum=0.9, factor=1.0, sparsity=sparsity, half=True)
    where, sent = sent_at(data, 20_000), decoded(backend, data, 20_000)
    large = where[g[where].double().abs().numpy() > scale / 100]
    torch.testing.assert_close(sent[large], g[large].double(), rtol=2**-10, atol=0)
    torch.testing.assert_close(sent + v.double(), g.double(), rtol=0, atol=2e-38)


# --- the same on all machines -------------------------------------------------------------------------
@built
@pytest.mark.parametrize(("sparsity", "half"), [(0.0, True), (0.25, False), (0.999, True)])
def test_the_number_of_threads_changes_no_bit(sparsity, half):
    n = 4_500_011  # enough for several threads in every part
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        g, u, v = tensors(n)
        data = NATIVE.encode(g, u, v, momentum=0.9, factor=1.0, sparsity=sparsity, half=half, norm_limit=10.0)
        out = torch.ones(n)
        NATIVE.decode_add(data, out, 0.3)
        results.append((u, v, out, data))
    assert torch.equal(results[0][3], results[1][3])
    assert all(same_bits(a, b) for a, b in zip(results[0][:3], results[1][:3], strict=True))


@built
@pytest.mark.parametrize("offset", [1, 3, 8, 15])
def test_the_address_of_a_tensor_changes_no_bit(offset):
    here = tensors(BLOCK + 77)
    moved = [torch.cat([torch.zeros(offset), t])[offset:] for t in here]
    first, second = (NATIVE.encode(*some, **USUAL | {"sparsity": 0.9}) for some in (here, moved))
    assert torch.equal(first, second)
    assert all(same_bits(a, b) for a, b in zip(here, moved, strict=True))


@built
@cases(n=[100, 3 * BLOCK + 77, 2 * PIECE + 63], sparsity=SPARSITIES, half=HALF)
def test_with_and_without_a_compiler_the_payload_has_the_same_bits(n, sparsity, half):
    """With momentum 0 and factor 1, where a fused multiply-add rounds like two operations."""
    settings = {"momentum": 0.0, "factor": 1.0, "sparsity": sparsity, "half": half}
    made = []
    for backend in BACKENDS:
        g, u, v = tensors(n)
        made.append((backend.encode(g, u, v, **settings), u, v))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@built
@cases(sparsity=[0.0, 0.5, 0.999], scale=[1.0, 1 / 3, -0.1], half=HALF)
def test_both_backends_add_the_same_bits(sparsity, scale, half):
    """Otherwise the parameters of two ranks, one with and one without a compiler, would drift apart."""
    n = 2 * PIECE + 63
    g, u, v = tensors(n)
    data = NATIVE.encode(g, u, v, momentum=0.9, factor=1.0, sparsity=sparsity, half=half)
    a, b = tensors(n, 1, seed=5)[0], tensors(n, 1, seed=5)[0]
    NATIVE.decode_add(data, a, scale)
    PLAIN.decode_add(data, b, scale)
    assert same_bits(a, b)


@both
def test_a_payload_can_be_read_inside_a_buffer_of_several(backend):
    made = []
    for n in (20_000, 33, 70_000):
        g, u, v = tensors(n)
        made.append(backend.encode(g, u, v, **USUAL | {"half": n != 33}))
    buffer, at = torch.cat(made), 0
    for data in made:
        head = codec.header(buffer[at:])
        assert torch.equal(decoded(backend, buffer[at : at + head.length], head.n), decoded(backend, data, head.n))
        at += head.length
    assert at == buffer.numel()
