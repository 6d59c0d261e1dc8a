from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference import lamb_step, lars_step
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fleetx.optim import stock

PIECE = 64  # of the tests, so that small tensors have borders
SHAPES = [(), (0,), (1,), (3, 0), (7, 5), (63,), (64,), (65,), (2, 64), (3, 43), (1000,), (17, 4, 5)]
LARS = {"lr": 0.5, "coeff": 0.02, "epsilon": 1e-9, "momentum": 0.9, "nesterov": False, "maximize": False}
LAMB = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6, "maximize": False}


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(stock, "PIECE", PIECE)


# --- helpers ------------------------------------------------------------------------------------------
def tensors(shapes, kinds, seed=0):
    """Parameters and gradients, and states of zeros."""
    source = torch.Generator().manual_seed(seed)
    drawn = [[torch.randn(shape, generator=source) for shape in shapes] for _ in range(2)]
    return drawn + [[torch.zeros(shape) for shape in shapes] for _ in range(kinds - 2)]


def mixed(n):
    """Decays, adapts and steps in which neighbours differ."""
    return [(0.01, 0.3, 0.0)[i % 3] for i in range(n)], [i % 4 != 1 for i in range(n)], [i % 5 + 1 for i in range(n)]


def lars(lists, decays, **settings):
    stock.lars(*lists, decays=decays, **LARS | settings)


def lamb(lists, decays, adapts, steps, **settings):
    stock.lamb(*lists, decays=decays, adapts=adapts, steps=steps, **LAMB | settings)


def wide(t):
    return t.double().numpy()


def lars_formula(p, g, v, *, decay, coeff, **settings):
    state = {"v": wide(v)}
    return lars_step(wide(p), wide(g), state, weight_decay=decay, lars_coeff=coeff, **settings), state["v"]


def lamb_formula(p, g, m, v, *, decay, adapt, step, beta1, beta2, epsilon, **settings):
    state = {"m": wide(m), "v": wide(v), "t": step - 1}
    options = {"betas": (beta1, beta2), "eps": epsilon, "weight_decay": decay, "adapt": adapt, **settings}
    return lamb_step(wide(p), wide(g), state, **options), state["m"], state["v"]


def assert_near(got, wanted, **tolerance):
    np.testing.assert_allclose(wide(got), wanted, **{"rtol": 2e-6, "atol": 1e-7} | tolerance)


def copies(lists):
    return [[t.clone() for t in values] for values in lists]


def summed(totals):
    """A `reduce` that finds its own squares in `totals` and what the other ranks have beside them."""

    def reduce(squares):
        assert squares.dtype is torch.float64
        squares.copy_(totals)

    return reduce


# --- the formulas -------------------------------------------------------------------------------------
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.usefixtures("small_pieces")
def test_lars_is_its_formula_in_float64(maximize, nesterov, momentum):
    lists = tensors(SHAPES, 3)
    decays, _, _ = mixed(len(SHAPES))
    settings = {"maximize": maximize, "nesterov": nesterov, "momentum": momentum}
    for _ in range(3):
        before = copies(lists)
        lars(lists, decays, **settings)
        for i, decay in enumerate(decays):
            p, v = lars_formula(*(values[i] for values in before), decay=decay, **LARS | settings)
            assert_near(lists[0][i], p)
            assert_near(lists[2][i], v)
            assert torch.equal(lists[1][i], before[1][i]), "the gradient is the user's"


@pytest.mark.parametrize("kept", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.usefixtures("small_pieces")
def test_lamb_is_its_formula_in_float64(maximize, kept, monkeypatch):
    monkeypatch.setattr(stock, "KEPT", kept)
    lists = tensors(SHAPES, 4)
    decays, adapts, steps = mixed(len(SHAPES))
    for k in range(3):
        before = copies(lists)
        now = [step + k for step in steps]
        lamb(lists, decays, adapts, now, maximize=maximize)
        for i in range(len(SHAPES)):
            of = {"decay": decays[i], "adapt": adapts[i], "step": now[i]}
            p, m, v = lamb_formula(*(values[i] for values in before), **of, **LAMB | {"maximize": maximize})
            assert_near(lists[0][i], p)
            assert_near(lists[2][i], m)
            assert_near(lists[3][i], v)
            assert torch.equal(lists[1][i], before[1][i]), "the gradient is the user's"


@pytest.mark.parametrize("threads", [1, 2])
def test_tensors_around_the_border_of_a_piece_are_no_exception(threads, monkeypatch):
    monkeypatch.setattr(stock, "KEPT", 0.2)
    before_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shapes = [(stock.PIECE + d,) for d in (-1, 0, 1)] + [(3 * stock.PIECE + 5,)]
        some, others = tensors(shapes, 3), tensors(shapes, 4)
        before, earlier = copies(some), copies(others)
        lars(some, [0.1] * 4)
        lamb(others, [0.1] * 4, [True] * 4, [1] * 4)
    finally:
        torch.set_num_threads(before_threads)
    for i in range(4):
        assert_near(some[0][i], lars_formula(*(x[i] for x in before), decay=0.1, **LARS)[0])
        p, _, _ = lamb_formula(*(x[i] for x in earlier), decay=0.1, adapt=True, step=1, **LAMB)
        assert_near(others[0][i], p, rtol=1e-5)


def test_lists_without_tensors_are_fine():
    lars([[], [], []], [], reduce=lambda squares: squares.view(0, 2))
    lamb([[], [], [], []], [], [], [])


@pytest.mark.parametrize("local", [1e-3, 1e-8, 1e-12, 0.0])
def test_a_rate_so_small_that_one_swallows_it_is_not_lost(local):
    """1 - (1 - 1e-12) is 1e-12 no more, in float64 neither."""
    p, g, v = tensors([(100,)], 3)
    lars([p, g, v], [0.0], lr=local)
    assert_near(v[0], local * wide(g[0]), rtol=1e-6, atol=0)


def test_a_layout_that_is_not_the_usual_is_walked_as_memory():
    lists = [[t.to(memory_format=torch.channels_last) for t in values] for values in tensors([(4, 3, 5, 2)], 4)]
    before = copies(lists)
    assert not lists[0][0].is_contiguous()
    lamb(lists, [0.1], [True], [1])
    assert_near(lists[0][0], lamb_formula(*(x[0] for x in before), decay=0.1, adapt=True, step=1, **LAMB)[0])


def test_a_view_in_the_middle_of_a_storage_leaves_its_neighbours_alone():
    whole = [torch.randn(30) for _ in range(2)] + [torch.zeros(30)]
    before = [t.clone() for t in whole]
    lars([[t[10:20]] for t in whole], [0.1])
    wanted = lars_formula(*(t[10:20] for t in before), decay=0.1, **LARS)
    assert_near(whole[0][10:20], wanted[0])
    for i in (0, 2):
        assert torch.equal(whole[i][:10], before[i][:10])
        assert torch.equal(whole[i][20:], before[i][20:])


def test_parameters_that_require_gradients_are_updated_and_autograd_notices():
    p = torch.nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    lars([[p], [torch.ones(3)], [torch.zeros(3)]], [0.1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- norms --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("zero", [0, 1])
def test_a_norm_of_zero_has_no_ratio(zero):
    some, others = tensors([(100,)], 3), tensors([(100,)], 4)
    for lists in (some, others):
        lists[zero][0].zero_()
    before, earlier = copies(some), copies(others)
    lars(some, [0.1])
    lamb(others, [0.1], [True], [1])
    assert_near(some[0][0], lars_formula(*(x[0] for x in before), decay=0.1, **LARS)[0])
    assert_near(others[0][0], lamb_formula(*(x[0] for x in earlier), decay=0.1, adapt=True, step=1, **LAMB)[0])


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_squares_that_fp32_cannot_hold_still_make_a_norm(scale):
    p, g, v = tensors([(100,)], 3)
    g[0].mul_(scale)
    before = copies([p, g, v])
    lars([p, g, v], [0.1])
    assert_near(v[0], lars_formula(*(x[0] for x in before), decay=0.1, **LARS)[1], atol=0, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.usefixtures("small_pieces")
def test_what_is_not_finite_does_not_vanish(kind, bad):
    for step, kinds in ((lambda x: lars(x, [0.1]), 3), (lambda x: lamb(x, [0.1], [True], [1]), 4)):
        lists = tensors([(200,)], kinds)
        lists[kind][0][150] = bad
        step(lists)
        assert not lists[0][0][150].isfinite()
        assert lists[2][0][150].isfinite() == (kinds == 4 and kind == 0), "LAMB's moments do not depend on p"


@pytest.mark.usefixtures("small_pieces")
def test_moments_stand_to_the_last_bit_while_the_direction_is_made_again(monkeypatch):
    """Even where the second is 0 beside a first that is not, as after sparse gradients with a small beta2."""
    g, m, v = torch.zeros(200), torch.randn(200), torch.zeros(200)
    for kept in (0.0, 1.0):
        monkeypatch.setattr(stock, "KEPT", kept)
        first, second = m.clone(), v.clone()
        lamb([[torch.randn(200)], [g], [first], [second]], [0.1], [True], [9], beta1=0.5)
        assert torch.equal(first, m * 0.5)
        assert torch.equal(second, v)


# --- shards -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", ["lars", "lamb"])
@pytest.mark.usefixtures("small_pieces")
def test_shards_with_their_norms_summed_are_the_whole(step):
    kinds, cut = (3, 131) if step == "lars" else (4, 131)
    whole = tensors([(300,), (10,)], kinds)
    shards = [[[t[:cut].clone() for t in x] for x in whole], [[t[cut:].clone() for t in x] for x in whole]]

    def run(lists, reduce=None):
        if step == "lars":
            lars(lists, [0.1, 0.0], reduce=reduce)
        else:
            lamb(lists, [0.1, 0.0], [True, False], [3, 3], reduce=reduce)

    found = []
    for shard in copies(shards[0]), copies(shards[1]):
        run(shard, reduce=lambda squares: found.append(squares.clone()))
    assert [f.shape for f in found] == [(2, 2), (2, 2)]
    assert not any(f[1].any() for f in found), "no norm is made that nobody needs"
    for shard in shards:
        run(shard, reduce=summed(found[0] + found[1]))
    run(whole)
    for i in range(2):
        torch.testing.assert_close(torch.cat([s[0][i] for s in shards]), whole[0][i], rtol=2e-6, atol=1e-7)


# --- memory -------------------------------------------------------------------------------------------
class Allocations(TorchDispatchMode):
    """The bytes of every storage that was made, none of them counted as freed: more than the peak, never less."""

    def __init__(self, known):
        super().__init__()
        self.known, self.bytes, self.held = {t.untyped_storage()._cdata for t in known}, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.known:
                self.known.add(t.untyped_storage()._cdata)
                self.held.append(t)  # or the next one could get its address
                self.bytes += t.untyped_storage().nbytes()
        return out


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_step_needs_a_twentieth_of_the_parameters_beside_them(nesterov):
    shapes = [(2048, 1000), (512, 512, 3, 3), (512, 512, 3, 3), *[(512, 2048)] * 9, *[(512,)] * 40]
    lists = tensors(shapes, 4)
    size = sum(t.nbytes for t in lists[0])
    decays = [0.1 if len(s) > 1 else 0.0 for s in shapes]
    for step in (
        lambda: lars(lists[:3], decays, nesterov=nesterov),
        lambda: lamb(lists, decays, [d > 0 for d in decays], [1] * len(shapes)),
    ):
        with Allocations([t for x in lists for t in x]) as made:
            step()
        assert made.bytes < size / 20
