from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fleetx.optim import native

BLOCK, GROUP = 16384, 512 * 1024  # as in kernels.c
SHAPES = {
    "borders of vectors": [(n,) for n in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)],
    "borders of blocks": [(n,) for n in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5)],
    "borders of groups": [(GROUP,), (3,), (GROUP + 1,), (GROUP - 3,), (3,), (5,)],
    "empty and without dimensions": [(0,), (), (3, 0), (4,), (0,)],
    "only empty": [(0,), (2, 0)],
    "nothing": [],
    "many small and one large": [*[(i % 40 + 1, 3) for i in range(150)], (700, 1000), *[(64,)] * 30],
}
LARS = {"lr": 0.1, "coeff": 0.02, "epsilon": 1e-9, "momentum": 0.9, "nesterov": False, "maximize": False}
LAMB = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6, "maximize": False}

# Where there is a compiler, a library that is not there is a failure and no reason to skip.
unbuilt = not native.available() and (shutil.which("cc") is None or os.environ.get("FLEETX_KERNELS") == "stock")
pytestmark = pytest.mark.skipif(unbuilt, reason=native.reason())


# --- the formulas, in float64 -------------------------------------------------------------------------
def lars64(p, g, v, *, lr, coeff, decay, epsilon, momentum, nesterov, maximize):
    pn, gn = np.linalg.norm(p), np.linalg.norm(g)
    local = lr
    if decay > 0 and pn > 0 and gn > 0:
        local = lr * coeff * pn / (gn + decay * pn + epsilon)
    d = local * ((-g if maximize else g) + decay * p)
    v = momentum * v + d
    return p - (d + momentum * v if nesterov else v), v


def lamb64(p, g, m, v, *, lr, beta1, beta2, epsilon, decay, adapt, step, maximize):
    g = -g if maximize else g
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    u = m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + epsilon) + decay * p
    pn, un = np.linalg.norm(p), np.linalg.norm(u)
    ratio = pn / un if adapt and pn > 0 and un > 0 else 1.0
    return p - lr * ratio * u, m, v


# --- helpers ------------------------------------------------------------------------------------------
def tensors(shapes, kinds=4, seed=0):
    """Parameters, gradients and states; the last kind is not negative, as LAMB's second moment."""
    source = torch.Generator().manual_seed(seed)
    lists = [[torch.randn(shape, generator=source) for shape in shapes] for _ in range(kinds)]
    return [*lists[:-1], [t.abs() for t in lists[-1]]]


def copies(lists):
    return [[t.clone() for t in values] for values in lists]


def doubles(values):
    return [t.double().numpy().ravel() for t in values]


def assert_near(got, wanted):
    for t, reference in zip(got, wanted, strict=True):
        np.testing.assert_allclose(t.double().numpy().ravel(), reference.ravel(), rtol=2e-5, atol=2e-6)


def assert_same(some, others):
    for a, b in zip(some, others, strict=True):
        for t, u in zip(a, b, strict=True):
            assert torch.equal(t.view(torch.int32), u.view(torch.int32))  # bit for bit, nan too


def lars(lists, decays, **settings):
    reduce = settings.pop("reduce", None)
    native.lars(*lists, decays=decays, reduce=reduce, **LARS | settings)


def lamb(lists, decays, adapts, steps, **settings):
    reduce = settings.pop("reduce", None)
    native.lamb(*lists, decays=decays, adapts=adapts, steps=steps, reduce=reduce, **LAMB | settings)


def mixed(n):
    """Decays, adapts and steps in which neighbours differ."""
    return [(0.01, 0.0, 0.3)[i % 3] for i in range(n)], [i % 4 != 1 for i in range(n)], [i % 5 + 1 for i in range(n)]


# --- the formulas -------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_lars_is_its_formula_in_float64(name, maximize, nesterov, threads):
    torch.set_num_threads(threads)
    lists = tensors(SHAPES[name], 3)
    p, g, v = map(doubles, lists)
    decays, _, _ = mixed(len(p))
    settings = {"maximize": maximize, "nesterov": nesterov}
    for _ in range(3):
        lars(lists, decays, **settings)
        for i, decay in enumerate(decays):
            p[i], v[i] = lars64(p[i], g[i], v[i], decay=decay, **LARS | settings)
    assert_near(lists[0], p)
    assert_near(lists[2], v)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_lamb_is_its_formula_in_float64(name, maximize, threads):
    torch.set_num_threads(threads)
    lists = tensors(SHAPES[name])
    p, g, m, v = map(doubles, lists)
    decays, adapts, steps = mixed(len(p))
    for k in range(3):
        now = [step + k for step in steps]
        lamb(lists, decays, adapts, now, maximize=maximize)
        for i in range(len(p)):
            of = {"decay": decays[i], "adapt": adapts[i], "step": now[i]}
            p[i], m[i], v[i] = lamb64(p[i], g[i], m[i], v[i], **of, **LAMB | {"maximize": maximize})
    assert_near(lists[0], p)
    assert_near(lists[2], m)
    assert_near(lists[3], v)


@pytest.mark.parametrize("zero", [0, 1])
def test_zero_parameters_or_gradients_have_no_ratio(zero):
    for kinds, step in ((3, "lars"), (4, "lamb")):
        lists = tensors([(100,), (20000,)], kinds)
        lists[zero] = [torch.zeros_like(t) for t in lists[zero]]
        lists[2:] = [[torch.zeros_like(t) for t in values] for values in lists[2:]]
        before = list(map(doubles, lists))
        if step == "lars":
            lars(lists, [0.1, 0.1])
            wanted = [lars64(*x, decay=0.1, **LARS)[0] for x in zip(*before, strict=True)]
        else:
            lamb(lists, [0.1, 0.1], [True, True], [1, 1])
            wanted = [lamb64(*x, decay=0.1, adapt=True, step=1, **LAMB)[0] for x in zip(*before, strict=True)]
        assert_near(lists[0], wanted)


def test_tiny_and_huge_gradients_still_have_a_norm():
    """Their squares are neither zero nor infinite in double."""
    for scale in (1e-30, 1e30):
        lists = tensors([(1000,)], 3)
        lists[1][0].mul_(scale)
        p, g, v = (values[0] for values in map(doubles, lists))
        lars(lists, [0.01])
        assert_near(lists[0], [lars64(p, g, v, decay=0.01, **LARS)[0]])


def test_any_dense_layout_is_read_flat():
    lists = [[t.to(memory_format=torch.channels_last) for t in values] for values in tensors([(8, 4, 3, 5)])]
    plain = [[t.contiguous() for t in values] for values in lists]
    lamb(lists, [0.1], [True], [3])
    lamb(plain, [0.1], [True], [3])
    assert_near(lists[0], doubles(plain[0]))
    assert lists[0][0].is_contiguous(memory_format=torch.channels_last)


# --- bit for bit --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SHAPES)
def test_the_number_of_threads_changes_no_bit(name):
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        some, others = tensors(SHAPES[name], 3), tensors(SHAPES[name])
        decays, adapts, steps = mixed(len(SHAPES[name]))
        for _ in range(2):
            lars(some, decays)
            lamb(others, decays, adapts, steps)
        results.append([*some, *others])
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize("offset", [1, 3, 8, 15])
def test_the_address_of_a_tensor_changes_no_bit(offset):
    """Else a resumed run would leave the path of the unbroken one, as its tensors lie elsewhere."""
    shapes = [(5,), (1000,), (3 * BLOCK + 7,)]
    aligned = tensors(shapes)
    moved = [[torch.cat([torch.zeros(offset), t])[offset:] for t in values] for values in aligned]
    lars(aligned[:3], [0.1] * 3)
    lars(moved[:3], [0.1] * 3)
    lamb(aligned, [0.1] * 3, [True] * 3, [4] * 3)
    lamb(moved, [0.1] * 3, [True] * 3, [4] * 3)
    assert_same(moved, aligned)


def test_gradients_are_left_as_they_are():
    lists = tensors([(3 * BLOCK + 7,), (50,)])
    before = copies(lists)[1]
    lars(lists[:3], [0.1, 0.0], maximize=True)
    lamb(lists, [0.1, 0.0], [True, False], [1, 1], maximize=True)
    assert_same([lists[1]], [before])


# --- shards -------------------------------------------------------------------------------------------
def test_a_reduce_that_adds_nothing_is_no_reduce():
    shapes = SHAPES["many small and one large"]
    decays, adapts, steps = mixed(len(shapes))
    seen = []
    whole, parts = tensors(shapes), tensors(shapes)
    lars(whole[:3], decays)
    lars(parts[:3], decays, reduce=seen.append)
    lamb(whole, decays, adapts, steps)
    lamb(parts, decays, adapts, steps, reduce=seen.append)
    assert_same(parts, whole)
    assert [(s.shape, s.dtype) for s in seen] == [((len(shapes), 2), torch.float64)] * 2


def test_two_shards_whose_squares_are_summed_are_the_whole():
    whole = tensors([(40000,), (0,), (1000,), (70,)])
    cuts = [15000, 0, 0, 3]  # one shard is empty where the other is the whole tensor
    halves = [
        copies([[t[:cut] for t, cut in zip(values, cuts, strict=True)] for values in whole]),
        copies([[t[cut:] for t, cut in zip(values, cuts, strict=True)] for values in whole]),
    ]
    decays, adapts, steps = [0.1, 0.1, 0.0, 0.2], [True, True, False, True], [2, 2, 2, 9]
    for step in (
        lambda lists, reduce=None: lars(lists[:3], decays, reduce=reduce),
        lambda lists, reduce=None: lamb(lists, decays, adapts, steps, reduce=reduce),
    ):
        squares: list[torch.Tensor] = []
        for half in halves:
            step(copies(half), squares.append)
        total = squares[0] + squares[1]
        for half in halves:
            step(half, lambda norms, total=total: norms.copy_(total))
        step(whole)
        for values, first, second in zip(whole, *halves, strict=True):
            joined = [torch.cat(pair) for pair in zip(first, second, strict=True)]
            torch.testing.assert_close(joined, values, rtol=1e-5, atol=1e-6)


# --- what is not a number, and what only decays -------------------------------------------------------
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 1])
def test_nan_and_inf_reach_the_parameter(bad, where):
    for position in (0, 17, BLOCK + 3):
        lists = tensors([(BLOCK + 9,), (BLOCK + 9,)])
        lists[where][0][position] = bad
        clean = tensors([(BLOCK + 9,), (BLOCK + 9,)])
        for kinds, step in (
            (3, lambda lists: lars(lists, [0.1, 0.1])),
            (4, lambda lists: lamb(lists, [0.1, 0.1], [True, True], [1, 1])),
        ):
            some, others = copies(lists[:kinds]), copies(clean[:kinds])
            step(some)
            step(others)
            assert not torch.isfinite(some[0][0][position])
            assert torch.equal(some[0][1], others[0][1])  # the other tensor does not notice


def test_a_moment_that_only_decays_ends_as_zero():
    lists = tensors([(100,)])
    lists[1][0].zero_()
    for values in lists[2:]:
        values[0].fill_(2e-38)
    for step in range(20):
        lamb(lists, [0.0], [True], [step + 1], beta2=0.9)
    assert not lists[2][0].any()
    assert not lists[3][0].any()
    assert torch.full((1,), 1e-38).mul(0.1).item() > 0  # and torch computes with denormal numbers as before


# --- torch around it ----------------------------------------------------------------------------------
def test_a_backward_through_an_older_graph_is_refused():
    p = torch.randn(10, requires_grad=True)
    loss = (p * p).sum()
    p.grad = torch.ones(10)
    lars([[p], [p.grad], [torch.zeros(10)]], [0.1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


ONE_POOL = """
import torch
from fleetx.optim import Lars

p = torch.nn.Parameter(torch.ones(100))
p.grad = torch.ones(100)
Lars([p], lr=0.1).step()
with open("/proc/self/maps") as maps:
    loaded = {line.split()[-1] for line in maps if "libgomp" in line}
assert len(loaded) == 1, loaded
"""


def test_there_is_one_pool_of_threads():
    """In a process of its own: other libraries that a test has imported bring others."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("only Linux tells which libraries a process has loaded")
    subprocess.run([sys.executable, "-c", ONE_POOL], check=True, timeout=60)


def test_stock_turns_it_off_and_other_words_are_refused(monkeypatch):
    monkeypatch.setenv("FLEETX_KERNELS", "stock")
    assert not native.available()
    assert "FLEETX_KERNELS=stock" in native.reason()
    monkeypatch.setenv("FLEETX_KERNELS", "compiled")
    assert native.available()
    assert native.reason() == ""
    monkeypatch.setenv("FLEETX_KERNELS", "fast")
    with pytest.raises(ValueError, match="FLEETX_KERNELS=fast: must be stock or compiled"):
        native.available()


def test_without_the_library_the_reason_says_how_to_get_it(tmp_path):
    """native.py alone, as an install without a compiler leaves it."""
    (tmp_path / "alone.py").write_text(Path(native.__file__).read_text())
    code = (
        "import alone, os\n"
        "assert not alone.available()\n"
        "print(alone.reason())\n"
        "os.environ['FLEETX_KERNELS'] = 'compiled'\n"
        "alone.available()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "no working C compiler" in done.stdout
    assert "reinstall" in done.stdout
    assert "RuntimeError: FLEETX_KERNELS=compiled: the compiled kernels are not installed" in done.stderr
