"""One step of DGC: u, v and what is sent, against their formulas in float64; in place, apart, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_tools import (
    BLOCK,
    SIZES,
    SPARSITIES,
    USUAL,
    both,
    built,
    decoded,
    halves,
    same_bits,
    sent_at,
    tensors,
    unbuilt,
)

from fleetx.parts.dgc import codec, native, payload, plain


def u64(g, u, momentum, factor, decay=0.0, p=None, norm_limit=None, **_):
    """u after a step, in float64."""
    scaled = factor * g.double()
    if norm_limit is not None and scaled.norm() > norm_limit:
        scaled *= norm_limit / scaled.norm()
    return momentum * u.double() + scaled + (decay * p.double() if decay else 0)


# --- u and v ------------------------------------------------------------------------------------------
@both
@halves
@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("n", SIZES)
def test_u_v_and_what_is_sent_are_their_formulas(n, sparsity, half, way):
    g, u, v = tensors(n)
    full = v.double() + u64(g, u, 0.9, 0.5)
    wanted_u = u64(g, u, 0.9, 0.5)
    data = way.encode(g, u, v, momentum=0.9, factor=0.5, sparsity=sparsity, half=half)
    k = max(1, int(n * (1 - sparsity)))
    of, sent, where = codec.header(data), decoded(way, data, n), sent_at(data, n)
    assert (of.n, of.count, of.finite, of.half, of.dense) == (n, k, True, half, k == n)
    assert of.length == data.numel()
    torch.testing.assert_close(sent + v.double(), full, rtol=2e-6, atol=2e-6)
    if k < n:
        wanted_u[where] = 0
        assert not u[where].any()
    torch.testing.assert_close(u.double(), wanted_u, rtol=2e-6, atol=2e-6)
    # The selection is exact: whatever was sent is as large as whatever was not.
    magnitudes = (sent + v.double()).abs()
    rest = np.setdiff1d(np.arange(n), where)
    assert len(rest) == n - k
    if len(rest):
        assert magnitudes[where].min() >= magnitudes[rest].max()
    if half:
        assert bool((v[where].double().abs() <= magnitudes[where] * 2**-10).all())
    else:
        assert not v[where].any()


@both
@halves
def test_what_is_sent_and_what_is_left_are_exactly_the_whole(half, way):
    """With momentum 0 and factor 1, v + u has no rounding but that of one sum in fp32."""
    g, u, v = tensors(70_000)
    full = v + g
    data = way.encode(g, u, v, momentum=0.0, factor=1.0, sparsity=0.99, half=half)
    assert torch.equal(decoded(way, data, 70_000) + v.double(), full.double())


@both
@pytest.mark.parametrize("norm_limit", [None, 1e9, 3.0])
@pytest.mark.parametrize("decay", [0.0, 0.03])
def test_decay_and_the_local_limit_are_their_formulas(decay, norm_limit, way):
    n = 3 * BLOCK + 77
    g, u, v, p = tensors(n, 4)
    settings = {"momentum": 0.8, "factor": -0.25, "decay": decay, "p": p, "norm_limit": norm_limit}
    wanted = u64(g, u, **settings)
    full = v.double() + wanted
    data = way.encode(g, u, v, sparsity=0.9, half=False, **settings)
    wanted[sent_at(data, n)] = 0
    torch.testing.assert_close(u.double(), wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(decoded(way, data, n) + v.double(), full, rtol=2e-6, atol=2e-6)


@both
@halves
@pytest.mark.parametrize("sparsity", [0.0, 0.9, 0.999])
def test_nothing_is_lost_in_twenty_steps(sparsity, half, way):
    """Without momentum, all gradients are what was sent and what is left."""
    n = 50_000
    u, v, total, sent = torch.zeros(n), torch.zeros(n), torch.zeros(n).double(), torch.zeros(n).double()
    for step in range(20):
        (g,) = tensors(n, 1, seed=step)
        total += g.double()
        sent += decoded(way, way.encode(g, u, v, momentum=0.0, factor=1.0, sparsity=sparsity, half=half), n)
    torch.testing.assert_close(sent + v.double(), total, rtol=0, atol=2e-5)


@both
def test_sparsity_zero_is_momentum_sgd(way):
    n = BLOCK + 5
    u, v, momentum = torch.zeros(n), torch.zeros(n), torch.zeros(n).double()
    for step in range(5):
        (g,) = tensors(n, 1, seed=step)
        momentum = 0.9 * momentum + g.double()
        data = way.encode(g, u, v, momentum=0.9, factor=1.0, sparsity=0.0, half=False)
        torch.testing.assert_close(decoded(way, data, n), momentum, rtol=1e-5, atol=1e-6)
        assert not v.any()
        torch.testing.assert_close(u.double(), momentum, rtol=1e-5, atol=1e-6)


@both
@halves
@pytest.mark.parametrize("sparsity", [0.0, 0.75, 0.999])
def test_out_of_place_is_in_place_and_keeps_the_old(sparsity, half, way):
    g, u, v = tensors(3 * BLOCK + 77)
    old = [t.clone() for t in (g, u, v)]
    u_out, v_out = torch.full_like(u, 7), torch.full_like(v, 7)
    settings = {"momentum": 0.9, "factor": 0.3, "sparsity": sparsity, "half": half, "norm_limit": 1.0}
    apart = way.encode(g, u, v, u_out=u_out, v_out=v_out, **settings)
    assert all(same_bits(a, b) for a, b in zip((g, u, v), old, strict=True))
    within = way.encode(g, u, v, **settings)
    assert torch.equal(apart, within)
    assert same_bits(u, u_out)
    assert same_bits(v, v_out)
    assert same_bits(g, old[0])


# --- what is not a number -----------------------------------------------------------------------------
@both
@halves
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("sparsity", [0.0, 0.75, 0.999])
@pytest.mark.parametrize("norm_limit", [None, 1.0])
def test_a_gradient_that_is_not_finite_is_told(bad, sparsity, half, norm_limit, way):
    n = 2 * BLOCK + 7
    for position in (0, 100, BLOCK, n - 1):
        g, u, v = tensors(n)
        g[position] = bad
        old = u.clone(), v.clone()
        outs = {"u_out": torch.empty(n), "v_out": torch.empty(n)}
        settings = {"momentum": 0.9, "factor": 1.0, "sparsity": sparsity, "half": half, "norm_limit": norm_limit}
        data = way.encode(g, u, v, **settings, **outs)
        assert not codec.header(data).finite
        assert data.numel() == payload.HEADER_BYTES
        assert same_bits(u, old[0])
        assert same_bits(v, old[1])
        with pytest.raises(ValueError, match="not finite: there is nothing to add; skip the step"):
            way.decode_add(data, torch.zeros(n), 1.0)


@both
def test_a_sum_that_overflows_is_told(way):
    g, u, v = torch.full((100,), 3e38), torch.zeros(100), torch.full((100,), 3e38)
    assert not codec.header(way.encode(g, u, v, **USUAL)).finite


@both
@halves
def test_the_largest_finite_numbers_are_sent(half, way):
    g = torch.full((20_000,), torch.finfo(torch.float32).max)
    u, v = torch.zeros_like(g), torch.zeros_like(g)
    data = way.encode(g, u, v, **USUAL | {"half": half})
    assert codec.header(data).finite
    torch.testing.assert_close(decoded(way, data, 20_000) + v.double(), g.double(), rtol=0, atol=0)


@built
def test_u_of_a_parameter_without_gradients_ends_as_zero():
    g, u, v = torch.zeros(1000), torch.full((1000,), 2e-38), torch.ones(1000)
    for _ in range(20):
        native.encode(g, u, v, **USUAL)
    assert not u.any()
    assert torch.full((1,), 1e-38).mul(0.1).item() > 0  # and torch computes with denormal numbers as before


# --- what is asked for --------------------------------------------------------------------------------
@both
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sparsity": 1.0}, "sparsity=1.0: must be at least 0 and less than 1"),
        ({"sparsity": -0.1}, "sparsity=-0.1"),
        ({"decay": 0.1}, "decay=0.1 needs the parameter"),
        ({"norm_limit": 0.0}, "norm_limit=0.0: must be positive"),
        ({"u_out": torch.zeros(100)}, "u_out and v_out come together"),
        ({"u_out": torch.zeros(99), "v_out": torch.zeros(100)}, "u_out has 99 elements on cpu, but the gradient 100"),
    ],
)
def test_what_cannot_be_is_refused(change, why, way):
    with pytest.raises(ValueError, match=why):
        way.encode(*tensors(100), **USUAL | change)


@both
def test_other_kinds_of_tensors_are_refused(way):
    g, u, v = tensors(100)
    for bad in (g.double(), torch.zeros(10, 10).t(), torch.zeros(200)[::2]):
        with pytest.raises(ValueError, match="g must be fp32 and contiguous"):
            way.encode(bad, u, v, **USUAL)
    with pytest.raises(ValueError, match="out must be fp32 and contiguous"):
        way.decode_add(way.encode(g, u, v, **USUAL), g.half(), 1.0)


@both
def test_a_tensor_of_any_shape_is_read_flat(way):
    g, u, v = tensors(20_000)
    shaped = [t.clone().view(10, 50, 40) for t in (g, u, v)]
    assert torch.equal(way.encode(g, u, v, **USUAL), way.encode(*shaped, **USUAL))
    assert torch.equal(u, shaped[1].view(-1))


def test_the_variable_chooses_between_the_two(monkeypatch):
    monkeypatch.setenv("FLEETX_KERNELS", "stock")
    assert "FLEETX_KERNELS=stock" in native.reason()
    assert codec._way(torch.zeros(1)) is plain
    monkeypatch.setenv("FLEETX_KERNELS", "fast")
    with pytest.raises(ValueError, match="FLEETX_KERNELS=fast: must be stock or compiled"):
        codec.encode(*tensors(100), **USUAL)
    if not unbuilt:
        monkeypatch.setenv("FLEETX_KERNELS", "compiled")
        assert codec._way(torch.zeros(1)) is native
