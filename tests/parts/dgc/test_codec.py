"""One step of DGC: u, v and what is sent, against their formulas in float64; in place and out of place; errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_tools import (
    BACKENDS,
    BLOCK,
    CHUNK,
    HALF,
    PIECE,
    SPARSITIES,
    USUAL,
    both,
    built,
    cases,
    decoded,
    same_bits,
    sent_at,
    tensors,
    unbuilt,
    zeros,
)

from fleetx.parts.dgc import codec, native, payload, plain

SIZES = [1, 2, *(s + i for s in (CHUNK, BLOCK, PIECE) for i in (-1, 0, 1)), 3 * BLOCK + 77, 2 * PIECE + 63]


def u64(g, u, momentum, factor, decay=0.0, p=None, norm_limit=None, **_):
    """u after a step, in float64."""
    scaled = factor * g.double()
    if norm_limit is not None and scaled.norm() > norm_limit:
        scaled *= norm_limit / scaled.norm()
    return momentum * u.double() + scaled + (decay * p.double() if decay else 0)


# --- u and v ------------------------------------------------------------------------------------------
@cases(n=SIZES, sparsity=SPARSITIES, half=HALF, backend=BACKENDS)
def test_u_v_and_the_sent_values_follow_their_formulas(n, sparsity, half, backend):
    g, u, v = tensors(n)
    expected_u = u64(g, u, 0.9, 0.5)
    full = v.double() + expected_u
    data = backend.encode(g, u, v, momentum=0.9, factor=0.5, sparsity=sparsity, half=half)
    k = max(1, int(n * (1 - sparsity)))
    head, sent, where = codec.header(data), decoded(backend, data, n), sent_at(data, n)
    assert (head.n, head.count, head.finite, head.half, head.dense) == (n, k, True, half, k == n)
    assert head.length == data.numel()
    torch.testing.assert_close(sent + v.double(), full, rtol=2e-6, atol=2e-6)
    if k < n:
        expected_u[where] = 0
        assert not u[where].any()
    torch.testing.assert_close(u.double(), expected_u, rtol=2e-6, atol=2e-6)
    # The selection is exact: everything that was sent is at least as large as everything that was not.
    magnitudes = (sent + v.double()).abs()
    rest = np.setdiff1d(np.arange(n), where)
    assert len(rest) == n - k
    if len(rest):
        assert magnitudes[where].min() >= magnitudes[rest].max()
    if half:
        assert bool((v[where].double().abs() <= magnitudes[where] * 2**-10).all())
    else:
        assert not v[where].any()


@cases(half=HALF, backend=BACKENDS)
def test_sent_plus_residual_is_exactly_the_total(half, backend):
    """With momentum 0 and factor 1, v + u has only the rounding of one sum in fp32."""
    g, u, v = tensors(70_000)
    full = v + g
    data = backend.encode(g, u, v, momentum=0.0, factor=1.0, sparsity=0.99, half=half)
    assert torch.equal(decoded(backend, data, 70_000) + v.double(), full.double())


@cases(norm_limit=[None, 1e9, 3.0], decay=[0.0, 0.03], backend=BACKENDS)
def test_decay_and_the_norm_limit_follow_their_formulas(norm_limit, decay, backend):
    n = 3 * BLOCK + 77
    g, u, v, p = tensors(n, 4)
    settings = {"momentum": 0.8, "factor": -0.25, "decay": decay, "p": p, "norm_limit": norm_limit}
    expected = u64(g, u, **settings)
    full = v.double() + expected
    data = backend.encode(g, u, v, sparsity=0.9, half=False, **settings)
    expected[sent_at(data, n)] = 0
    torch.testing.assert_close(u.double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(decoded(backend, data, n) + v.double(), full, rtol=2e-6, atol=2e-6)


@cases(sparsity=[0.0, 0.9, 0.999], half=HALF, backend=BACKENDS)
def test_nothing_is_lost_in_twenty_steps(sparsity, half, backend):
    """Without momentum, the sum of all gradients is what was sent plus what is left."""
    n = 20_000
    (u, v), total, sent = zeros(n), torch.zeros(n).double(), torch.zeros(n).double()
    for step in range(20):
        (g,) = tensors(n, 1, seed=step)
        total += g.double()
        sent += decoded(backend, backend.encode(g, u, v, momentum=0.0, factor=1.0, sparsity=sparsity, half=half), n)
    torch.testing.assert_close(sent + v.double(), total, rtol=0, atol=2e-5)


@both
def test_sparsity_zero_is_sgd_with_momentum(backend):
    n = BLOCK + 5
    (u, v), momentum = zeros(n), torch.zeros(n).double()
    for step in range(5):
        (g,) = tensors(n, 1, seed=step)
        momentum = 0.9 * momentum + g.double()
        data = backend.encode(g, u, v, momentum=0.9, factor=1.0, sparsity=0.0, half=False)
        torch.testing.assert_close(decoded(backend, data, n), momentum, rtol=1e-5, atol=1e-6)
        assert not v.any()
        torch.testing.assert_close(u.double(), momentum, rtol=1e-5, atol=1e-6)


@cases(sparsity=[0.0, 0.75, 0.999], half=HALF, backend=BACKENDS)
def test_out_of_place_equals_in_place_and_keeps_the_old(sparsity, half, backend):
    g, u, v = tensors(3 * BLOCK + 77)
    old = [t.clone() for t in (g, u, v)]
    u_out, v_out = torch.full_like(u, 7), torch.full_like(v, 7)
    settings = {"momentum": 0.9, "factor": 0.3, "sparsity": sparsity, "half": half, "norm_limit": 1.0}
    out_of_place = backend.encode(g, u, v, u_out=u_out, v_out=v_out, **settings)
    assert all(same_bits(a, b) for a, b in zip((g, u, v), old, strict=True))
    in_place = backend.encode(g, u, v, **settings)
    assert torch.equal(out_of_place, in_place)
    assert same_bits(u, u_out)
    assert same_bits(v, v_out)
    assert same_bits(g, old[0])


# --- numbers that are not finite ----------------------------------------------------------------------
@cases(bad=[float("nan"), float("inf"), -float("inf")], sparsity=[0.0, 0.75, 0.999], half=HALF, norm_limit=[None, 1.0],
       backend=BACKENDS)  # fmt: skip
def test_a_gradient_that_is_not_finite_is_reported(bad, sparsity, half, norm_limit, backend):
    n = 2 * BLOCK + 7
    for position in (0, 100, BLOCK, n - 1):
        g, u, v = tensors(n)
        g[position] = bad
        old = u.clone(), v.clone()
        outs = {"u_out": torch.empty(n), "v_out": torch.empty(n)}
        settings = {"momentum": 0.9, "factor": 1.0, "sparsity": sparsity, "half": half, "norm_limit": norm_limit}
        data = backend.encode(g, u, v, **settings, **outs)
        assert not codec.header(data).finite
        assert data.numel() == payload.HEADER_BYTES
        assert same_bits(u, old[0])
        assert same_bits(v, old[1])
        with pytest.raises(ValueError, match="was not finite: there is nothing to add, so skip the step"):
            backend.decode_add(data, torch.zeros(n), 1.0)


@both
def test_a_sum_that_overflows_is_reported(backend):
    g, u, v = torch.full((100,), 3e38), torch.zeros(100), torch.full((100,), 3e38)
    assert not codec.header(backend.encode(g, u, v, **USUAL)).finite


@cases(half=HALF, backend=BACKENDS)
def test_the_largest_finite_numbers_are_sent(half, backend):
    g = torch.full((20_000,), torch.finfo(torch.float32).max)
    u, v = zeros(20_000)
    data = backend.encode(g, u, v, **USUAL | {"half": half})
    assert codec.header(data).finite
    torch.testing.assert_close(decoded(backend, data, 20_000) + v.double(), g.double(), rtol=0, atol=0)


@built
def test_u_of_a_parameter_without_gradients_becomes_zero():
    g, u, v = torch.zeros(1000), torch.full((1000,), 2e-38), torch.ones(1000)
    for _ in range(20):
        codec.encode(g, u, v, **USUAL, backend=native)
    assert not u.any()
    assert torch.full((1,), 1e-38).mul(0.1).item() > 0  # torch still computes with denormals


# --- arguments ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": 1.0}, "sparsity=1.0: must be at least 0 and less than 1"),
        ({"sparsity": -0.1}, "sparsity=-0.1"),
        ({"decay": 0.1}, "decay=0.1 needs the parameter"),
        ({"norm_limit": 0.0}, "norm_limit=0.0: must be positive"),
        ({"u_out": torch.zeros(100)}, "u_out and v_out must be passed together"),
        (
            {"u_out": torch.zeros(99), "v_out": torch.zeros(100)},
            "u_out has 99 elements on cpu, but the gradient has 100",
        ),
    ],
)
def test_invalid_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        codec.encode(*tensors(100), **USUAL | change)


def test_only_contiguous_fp32_tensors_are_supported():
    g, u, v = tensors(100)
    for bad in (g.double(), torch.zeros(10, 10).t(), torch.zeros(200)[::2]):
        with pytest.raises(ValueError, match="g must be fp32 and contiguous"):
            codec.encode(bad, u, v, **USUAL)
    with pytest.raises(ValueError, match="out must be fp32 and contiguous"):
        codec.decode_add(codec.encode(g, u, v, **USUAL), g.half(), 1.0)


@both
def test_a_tensor_of_any_shape_is_read_flat(backend):
    g, u, v = tensors(20_000)
    shaped = [t.clone().view(10, 50, 40) for t in (g, u, v)]
    assert torch.equal(backend.encode(g, u, v, **USUAL), backend.encode(*shaped, **USUAL))
    assert torch.equal(u, shaped[1].view(-1))


def test_an_environment_variable_chooses_the_backend(monkeypatch):
    monkeypatch.setenv("FLEETX_KERNELS", "foreach")
    assert "FLEETX_KERNELS=foreach" in native.reason()
    assert codec._backend(torch.zeros(1)) is plain
    monkeypatch.setenv("FLEETX_KERNELS", "fast")
    with pytest.raises(ValueError, match="FLEETX_KERNELS=fast: must be foreach, compiled or triton"):
        codec.encode(*tensors(100), **USUAL)
    if not unbuilt:
        monkeypatch.setenv("FLEETX_KERNELS", "compiled")
        assert codec._backend(torch.zeros(1)) is native
