"""Which values of DGC are sent, against a sort; and that they are the same however they are computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_tools import BLOCK, SPARSITIES, USUAL, both, built, decoded, halves, same_bits, sent_at, tensors

from fleetx.parts.dgc import codec, native, payload, plain


def gaussian(n):
    return tensors(n, 1)[0]


def heavy_tailed(n):
    return tensors(n, 1)[0].double().pow(15).mul(1e-3).float()


def a_few_huge(n):
    x = tensors(n, 1)[0] * 1e-3
    x[:: n // 5] = 1e30
    return x


def clustered(n):
    """As of an embedding: all that is large lies together."""
    x = tensors(n, 1)[0] * 1e-6
    x[n // 2 : n // 2 + n // 50] *= 1e6
    return x


def constant(n):
    return torch.full((n,), -0.25)


def many_equal(n):
    return torch.randint(-3, 4, (n,)).float()


def tiny(n):
    return tensors(n, 1)[0] * 1e-36


@both
@halves
@pytest.mark.parametrize("sparsity", [0.25, 0.9375, 0.999])
@pytest.mark.parametrize("n", [20_000, 150_000])
@pytest.mark.parametrize("make", [gaussian, heavy_tailed, a_few_huge, clustered, constant, many_equal, tiny])
def test_the_largest_are_sent_whatever_the_distribution(make, n, sparsity, half, way):
    x, u, v = make(n), torch.zeros(n), torch.zeros(n)
    data = way.encode(x, u, v, momentum=0.9, factor=1.0, sparsity=sparsity, half=half)
    where, k = sent_at(data, n), payload.wanted(n, sparsity)
    magnitudes = x.double().abs().numpy()
    # What 16 bits can hold beside the largest; and denormal numbers may be taken for zeros.
    least = 2.0 ** max(np.floor(np.log2(magnitudes.max())) - 38 if half else -126, -126)
    assert min(k, (magnitudes >= least).sum()) <= len(where) <= min(k, (magnitudes > 0).sum())
    # Stable, so that of equal ones the first are taken.
    assert np.array_equal(where, np.sort(np.argsort(-magnitudes, kind="stable")[: len(where)]))


@both
def test_of_equal_values_all_are_sent_in_turn(way):
    n, sparsity = 64_000, 0.75
    g, u, v = torch.ones(n), torch.zeros(n), torch.zeros(n)
    turns = []
    for _ in range(4):
        data = way.encode(g, u, v, momentum=0.0, factor=1.0, sparsity=sparsity, half=True)
        turns.append(sent_at(data, n))
        g = torch.zeros(n)
    assert np.array_equal(np.concatenate(turns), np.arange(n))
    assert not v.any()


@both
@halves
@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.999])
def test_zeros_are_sent_only_where_everything_is(sparsity, half, way):
    g, u, v = torch.zeros(20_000), torch.zeros(20_000), torch.zeros(20_000)
    data = way.encode(g, u, v, momentum=0.9, factor=1.0, sparsity=sparsity, half=half)
    assert codec.header(data).count == (0 if sparsity else 20_000)
    assert codec.header(data).finite
    assert not decoded(way, data, 20_000).any()


@both
@pytest.mark.parametrize("scale", [1e-35, 1e-20, 1e-8, 1.0, 7e4, 1e20, 1e37])
@pytest.mark.parametrize("sparsity", [0.0, 0.99])
def test_sixteen_bits_have_the_precision_and_not_the_range_of_fp16(scale, sparsity, way):
    (g,) = tensors(20_000, 1)
    g *= scale
    u, v = torch.zeros_like(g), torch.zeros_like(g)
    data = way.encode(g, u, v, momentum=0.9, factor=1.0, sparsity=sparsity, half=True)
    where, sent = sent_at(data, 20_000), decoded(way, data, 20_000)
    large = where[g[where].double().abs().numpy() > scale / 100]
    torch.testing.assert_close(sent[large], g[large].double(), rtol=2**-10, atol=0)
    torch.testing.assert_close(sent + v.double(), g.double(), rtol=0, atol=2e-38)


# --- the same on all machines -------------------------------------------------------------------------
@built
@halves
@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.9375, 0.999])
def test_the_number_of_threads_changes_no_bit(sparsity, half):
    n = 5_000_011  # enough for several threads in every part
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        g, u, v = tensors(n)
        data = native.encode(g, u, v, momentum=0.9, factor=1.0, sparsity=sparsity, half=half, norm_limit=10.0)
        out = tensors(n, 1, seed=9)[0]
        native.decode_add(data, out, 0.3)
        results.append((data, u, v, out))
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0])
        assert all(same_bits(a, b) for a, b in zip(result[1:], results[0][1:], strict=True))


@built
@pytest.mark.parametrize("offset", [1, 3, 8, 15])
def test_the_address_of_a_tensor_changes_no_bit(offset):
    lists = tensors(BLOCK + 77)
    moved = [torch.cat([torch.zeros(offset), t])[offset:] for t in lists]
    first, second = (native.encode(*some, **USUAL | {"sparsity": 0.9}) for some in (lists, moved))
    assert torch.equal(first, second)
    assert all(same_bits(a, b) for a, b in zip(lists, moved, strict=True))


@built
@halves
@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("n", [100, 3 * BLOCK + 77, 200_000])
def test_with_and_without_a_compiler_the_payload_has_the_same_bits(n, sparsity, half):
    """Momentum 0 and factor 1, with which no multiply-add is rounded in another way."""
    settings = {"momentum": 0.0, "factor": 1.0, "sparsity": sparsity, "half": half}
    made = []
    for way in (native, plain):
        g, u, v = tensors(n)
        made.append((way.encode(g, u, v, **settings), u, v))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    assert torch.equal(made[0][2], made[1][2])


@built
@halves
@pytest.mark.parametrize("scale", [1.0, 1 / 3, -0.1])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.999])
def test_both_ways_add_the_same_bits(sparsity, scale, half):
    """Else the parameters of two ranks, one with and one without a compiler, would drift apart."""
    n = 200_000
    g, u, v = tensors(n)
    data = native.encode(g, u, v, momentum=0.9, factor=1.0, sparsity=sparsity, half=half)
    some, others = tensors(n, 1, seed=5)[0], tensors(n, 1, seed=5)[0]
    native.decode_add(data, some, scale)
    plain.decode_add(data, others, scale)
    assert same_bits(some, others)


@both
def test_a_payload_is_read_where_it_lies_in_a_buffer_of_several(way):
    made = []
    for n in (20_000, 33, 70_000):
        g, u, v = tensors(n)
        made.append(way.encode(g, u, v, **USUAL | {"half": n != 33}))
    buffer, at = torch.cat(made), 0
    for data in made:
        of = codec.header(buffer[at:])
        assert torch.equal(decoded(way, buffer[at : at + of.length], of.n), decoded(way, data, of.n))
        at += of.length
    assert at == buffer.numel()
