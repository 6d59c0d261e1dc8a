"""The kernels by themselves: every implementation against float64, and bit for bit where promised."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import lamb_step, lars_step
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import forked_command
from covering import cases
from fleetx.optim import foreach, native
from fleetx.optim.dispatch import gpu

BLOCK, GROUP = 16384, 512 * 1024  # as in kernels.c
SHAPES = {
    "vectors": [(n,) for n in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)],
    "blocks": [(n,) for n in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5)],
    "groups": [(GROUP,), (3,), (GROUP + 1,), (GROUP - 3,), (3,), (5,)],
    "empty and scalar": [(0,), (), (3, 0), (4,), (0,)],
    "only empty": [(0,), (2, 0)],
    "nothing": [],
    "many small and one large": [*[(i % 40 + 1, 3) for i in range(150)], (700, 1000), *[(64,)] * 30],
}
LARS = {"lr": 0.1, "coeff": 0.02, "epsilon": 1e-9, "momentum": 0.9, "nesterov": False, "maximize": False}
LAMB = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6, "maximize": False}
BOTH = [False, True]

# With a compiler, a missing library is a failure and not a reason to skip.
unbuilt = not native.available() and (shutil.which("cc") is None or os.environ.get("FLEETX_KERNELS") == "foreach")
built = pytest.mark.skipif(unbuilt, reason=native.reason())
with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


class Kernels:
    """compiled; flat: foreach on flat fp32 arrays, with torch's fused kernels; general: foreach on anything else;
    triton: what a GPU runs, in Triton's interpreter."""

    def __init__(self, name):
        self.name = name

    def lars(self, lists, decays, **settings):
        self._call("lars", lists, LARS | settings | {"decays": decays})

    def lamb(self, lists, decays, adapts, steps, **settings):
        self._call("lamb", lists, LAMB | settings | {"decays": decays, "adapts": adapts, "steps": steps})

    def step(self, lists, *arguments, **settings):
        """LARS for three lists, LAMB for four."""
        self.lars(lists, arguments[0], **settings) if len(lists) == 3 else self.lamb(lists, *arguments, **settings)

    def _call(self, function, lists, settings):
        reduce, kind = settings.pop("reduce", None), {"lars": foreach.LarsStep, "lamb": foreach.LambStep}[function]
        step = kind(**settings)
        if self.name == "compiled":
            return getattr(native, function)(*lists, step, reduce)
        if self.name == "triton":
            kernels = gpu.loaded()
            # The interpreter's time is per operation, not per element; and it warns of infinity.
            with np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernels, "CHUNK", BLOCK // 2)
                patch.setattr(kernels, "BLOCK", BLOCK // 4)
                return getattr(kernels, function)(*lists, step, reduce)
        if self.name == "flat":
            lists = [[t.as_strided((t.numel(),), (1,)) for t in values] for values in lists]
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(foreach, "_CPU_BLOCK", BLOCK)
            if self.name == "general":
                patch.setattr(foreach, "is_plain", lambda tensors: False)
            getattr(foreach, function)(*lists, step, reduce)


COMPILED, FLAT, GENERAL, TRITON = map(Kernels, ("compiled", "flat", "general", "triton"))
ON_CPUS = [COMPILED, FLAT, GENERAL]
ALL = [*ON_CPUS, TRITON]
ON_CPU = FLAT if unbuilt else COMPILED
MARKS = {COMPILED: [built], TRITON: [with_triton]}
cases = functools.partial(cases, marks=lambda value: MARKS.get(value, []) if isinstance(value, Kernels) else [])


# --- helpers ------------------------------------------------------------------------------------------
def tensors(shapes, kinds=4, seed=0):
    """Parameters, gradients and states. The last kind is not negative, like LAMB's second moment."""
    source = torch.Generator().manual_seed(seed)
    lists = [[torch.randn(shape, generator=source) for shape in shapes] for _ in range(kinds)]
    return [*lists[:-1], [t.abs() for t in lists[-1]]]


def copies(lists):
    return [[t.clone() for t in values] for values in lists]


def wide(t):
    return t.double().numpy()


def lars_formula(p, g, v, *, decay, coeff, **settings):
    state = {"v": wide(v)}
    return lars_step(wide(p), wide(g), state, weight_decay=decay, lars_coeff=coeff, **settings), state["v"]


def lamb_formula(p, g, m, v, *, decay, adapt, step, beta1, beta2, epsilon, **settings):
    state = {"m": wide(m), "v": wide(v), "t": step - 1}
    options = {"betas": (beta1, beta2), "eps": epsilon, "weight_decay": decay, "adapt": adapt, **settings}
    return lamb_step(wide(p), wide(g), state, **options), state["m"], state["v"]


def assert_near(t, expected, **tolerance):
    np.testing.assert_allclose(wide(t), expected, **{"rtol": 2e-5, "atol": 2e-6} | tolerance)


def assert_same(lists, others):
    for a, b in zip(lists, others, strict=True):
        for t, u in zip(a, b, strict=True):
            assert torch.equal(t.view(torch.int32), u.view(torch.int32))  # bit for bit, NaN too


def assert_equal(lists, others):
    """But for one rounding more or less: a processor may fuse a multiplication and an addition."""
    for a, b in zip(lists, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def mixed(n):
    """Decays, adapts and steps in which neighbours differ."""
    return [(0.01, 0.0, 0.3)[i % 3] for i in range(n)], [i % 4 != 1 for i in range(n)], [i % 5 + 1 for i in range(n)]


# --- the formulas -------------------------------------------------------------------------------------
@cases(kernels=ON_CPUS, shapes=list(SHAPES), maximize=BOTH, nesterov=BOTH, momentum=[0.9, 0.0], threads=[1, 2, 5])
def test_lars_matches_its_formula_in_float64(kernels, shapes, maximize, nesterov, momentum, threads):
    torch.set_num_threads(threads)
    lists = tensors(SHAPES[shapes], 3)
    decays, _, _ = mixed(len(lists[0]))
    settings = {"maximize": maximize, "nesterov": nesterov, "momentum": momentum}
    for _ in range(2):
        before = copies(lists)
        kernels.lars(lists, decays, **settings)
        for i, decay in enumerate(decays):
            p, v = lars_formula(*(values[i] for values in before), decay=decay, **LARS | settings)
            assert_near(lists[0][i], p)
            assert_near(lists[2][i], v)
            assert torch.equal(lists[1][i], before[1][i]), "the gradient belongs to the user"


@cases(kernels=ON_CPUS, shapes=list(SHAPES), maximize=BOTH, threads=[1, 2, 5])
def test_lamb_matches_its_formula_in_float64(kernels, shapes, maximize, threads):
    torch.set_num_threads(threads)
    lists = tensors(SHAPES[shapes])
    decays, adapts, steps = mixed(len(lists[0]))
    for k in range(2):
        before = copies(lists)
        now = [step + k for step in steps]
        kernels.lamb(lists, decays, adapts, now, maximize=maximize)
        for i in range(len(decays)):
            own = {"decay": decays[i], "adapt": adapts[i], "step": now[i]}
            p, m, v = lamb_formula(*(values[i] for values in before), **own, **LAMB | {"maximize": maximize})
            assert_near(lists[0][i], p)
            assert_near(lists[2][i], m)
            assert_near(lists[3][i], v)
            assert torch.equal(lists[1][i], before[1][i]), "the gradient belongs to the user"


INTERPRETED = ["vectors", "blocks", "empty and scalar", "only empty", "nothing"]  # others would take minutes


@with_triton
@cases(shapes=INTERPRETED, maximize=BOTH, nesterov=BOTH, momentum=[0.9, 0.0])
def test_lars_on_a_gpu_equals_lars_on_a_cpu(shapes, maximize, nesterov, momentum):
    settings = {"maximize": maximize, "nesterov": nesterov, "momentum": momentum}
    found, expected = tensors(SHAPES[shapes], 3), tensors(SHAPES[shapes], 3)
    decays, _, _ = mixed(len(found[0]))
    TRITON.lars(found, decays, **settings)
    ON_CPU.lars(expected, decays, **settings)
    assert_equal(found, expected)


@with_triton
@cases(shapes=INTERPRETED, maximize=BOTH)
def test_lamb_on_a_gpu_equals_lamb_on_a_cpu(shapes, maximize):
    found, expected = tensors(SHAPES[shapes]), tensors(SHAPES[shapes])
    arguments = mixed(len(found[0]))
    TRITON.lamb(found, *arguments, maximize=maximize)
    ON_CPU.lamb(expected, *arguments, maximize=maximize)
    assert_equal(found, expected)


@cases(kernels=ALL, zero=[0, 1])
def test_without_parameters_or_gradients_there_is_no_ratio(kernels, zero):
    lars, lamb = tensors([(100,), (20000,)], 3), tensors([(100,), (20000,)])
    for lists in (lars, lamb):
        lists[zero] = [torch.zeros_like(t) for t in lists[zero]]
        lists[2:] = [[torch.zeros_like(t) for t in values] for values in lists[2:]]
        before = copies(lists)
        kernels.step(lists, [0.1, 0.1], [True, True], [1, 1])
        for i in range(2):
            given = [values[i] for values in before]
            if lists is lars:
                assert_near(lists[0][i], lars_formula(*given, decay=0.1, **LARS)[0])
            else:
                assert_near(lists[0][i], lamb_formula(*given, decay=0.1, adapt=True, step=1, **LAMB)[0])


@cases(kernels=ALL, scale=[1e-30, 1e-25, 1e25, 1e30])
def test_tiny_and_huge_gradients_have_a_norm(kernels, scale):
    """Their squares do not fit in fp32."""
    lists = tensors([(1000,)], 3)
    lists[1][0].mul_(scale)
    before = copies(lists)
    kernels.lars(lists, [0.01])
    p, v = lars_formula(*(values[0] for values in before), decay=0.01, **LARS)
    assert_near(lists[0][0], p)
    assert_near(lists[2][0], v)


@cases(kernels=ALL, rate=[1e-3, 1e-8, 1e-12, 0.0])
def test_tiny_rates_are_exact(kernels, rate):
    """1 - (1 - 1e-12) is not 1e-12, even in float64."""
    p, g, _ = tensors([(100,)], 3)
    v = [torch.zeros(100)]
    kernels.lars([p, g, v], [0.0], lr=rate)
    assert_near(v[0], rate * wide(g[0]), rtol=1e-6, atol=0)


@cases(kernels=[COMPILED, FLAT])
def test_dense_layouts_are_read_flat(kernels):
    lists = [[t.to(memory_format=torch.channels_last) for t in values] for values in tensors([(8, 4, 3, 5)])]
    contiguous = [[t.contiguous() for t in values] for values in lists]
    kernels.lamb(lists, [0.1], [True], [3])
    kernels.lamb(contiguous, [0.1], [True], [3])
    assert_near(lists[0][0], wide(contiguous[0][0]))
    assert lists[0][0].is_contiguous(memory_format=torch.channels_last)


@cases(kernels=ALL, kinds=[3, 4])
def test_only_the_tensors_themselves_change(kernels, kinds):
    memory = [torch.randn(30).abs() for _ in range(kinds)]
    before = [t.clone() for t in memory]
    kernels.step([[t[10:20]] for t in memory], [0.1], [True], [1])
    for t, old in zip(memory, before, strict=True):
        assert torch.equal(t[:10], old[:10])
        assert torch.equal(t[20:], old[20:])


# --- bit for bit --------------------------------------------------------------------------------------
@built
@pytest.mark.parametrize("shapes", ["vectors", "blocks", "groups", "many small and one large"])
def test_compiled_results_do_not_depend_on_the_number_of_threads(shapes):
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        lars, lamb = tensors(SHAPES[shapes], 3), tensors(SHAPES[shapes])
        decays, adapts, steps = mixed(len(SHAPES[shapes]))
        COMPILED.lars(lars, decays)
        COMPILED.lamb(lamb, decays, adapts, steps)
        results.append([*lars, *lamb])
    for result in results[1:]:
        assert_same(result, results[0])


@built
@pytest.mark.parametrize("offset", [1, 3, 8, 15])
def test_compiled_results_do_not_depend_on_the_address(offset):
    """Otherwise a resumed run would diverge from the uninterrupted one, because its tensors are elsewhere in memory."""
    shapes = [(5,), (1000,), (3 * BLOCK + 7,)]
    aligned = tensors(shapes)
    moved = [[torch.cat([torch.zeros(offset), t])[offset:] for t in values] for values in aligned]
    for lists in (aligned, moved):
        COMPILED.lars(lists[:3], [0.1] * 3)
        COMPILED.lamb(lists, [0.1] * 3, [True] * 3, [4] * 3)
    assert_same(moved, aligned)


# --- shards -------------------------------------------------------------------------------------------
@built
def test_a_reduce_that_changes_nothing_changes_no_bit():
    shapes = SHAPES["many small and one large"]
    arguments = mixed(len(shapes))
    seen = []
    for kinds in (3, 4):
        alone, reduced = tensors(shapes, kinds), tensors(shapes, kinds)
        COMPILED.step(alone, *arguments)
        COMPILED.step(reduced, *arguments, reduce=seen.append)
        assert_same(reduced, alone)
    assert [(s.shape, s.dtype) for s in seen] == [((len(shapes), 2), torch.float64)] * 2


@cases(kernels=ALL, kinds=[3, 4])
def test_shards_with_summed_norms_equal_the_full_tensors(kernels, kinds):
    full = tensors([(40000,), (0,), (1000,), (70,)], kinds)
    cuts = [15000, 0, 0, 3]  # one shard may be empty and the other the full tensor
    shards = [
        copies([[t[:cut] for t, cut in zip(values, cuts, strict=True)] for values in full]),
        copies([[t[cut:] for t, cut in zip(values, cuts, strict=True)] for values in full]),
    ]
    arguments = [0.1, 0.1, 0.0, 0.2], [True, True, False, True], [2, 2, 2, 9]
    squares: list[torch.Tensor] = []
    for shard in shards:
        kernels.step(copies(shard), *arguments, reduce=lambda norms: squares.append(norms.clone()))
    assert all(s.dtype is torch.float64 for s in squares)
    for shard in shards:
        kernels.step(shard, *arguments, reduce=lambda norms: norms.copy_(squares[0] + squares[1]))
    kernels.step(full, *arguments)
    for values, first, second in zip(full, *shards, strict=True):
        joined = [torch.cat(pair) for pair in zip(first, second, strict=True)]
        torch.testing.assert_close(joined, values, rtol=1e-5, atol=1e-6)


# --- NaN, infinity, denormals -------------------------------------------------------------------------
@cases(kernels=ALL, kinds=[3, 4], bad=[float("nan"), float("inf"), -float("inf")], where=[0, 1], at=[0, 17, BLOCK + 3])
def test_nan_and_inf_reach_the_parameter(kernels, kinds, bad, where, at):
    clean = tensors([(BLOCK + 9,), (BLOCK + 9,)], kinds)
    dirty = copies(clean)
    dirty[where][0][at] = bad
    for lists in (clean, dirty):
        kernels.step(lists, [0.1, 0.1], [True, True], [1, 1])
    assert not torch.isfinite(dirty[0][0][at])
    assert torch.equal(dirty[0][1], clean[0][1])  # the other tensor is not affected


@built
def test_a_moment_that_only_decays_becomes_zero():
    lists = tensors([(100,)])
    lists[1][0].zero_()
    for values in lists[2:]:
        values[0].fill_(2e-38)
    for step in range(20):
        COMPILED.lamb(lists, [0.0], [True], [step + 1], beta2=0.9)
    assert not lists[2][0].any()
    assert not lists[3][0].any()
    assert torch.full((1,), 1e-38).mul(0.1).item() > 0  # torch still computes with denormals


# --- torch --------------------------------------------------------------------------------------------
@cases(kernels=ALL, kinds=[3, 4])
def test_autograd_rejects_a_backward_through_an_older_graph(kernels, kinds):
    p = torch.randn(10, requires_grad=True)
    loss = (p * p).sum()
    kernels.step([[p], [torch.ones(10)], *([torch.zeros(10)] for _ in range(kinds - 2))], [0.1], [True], [1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Allocations(TorchDispatchMode):
    """Counts the bytes of every new storage, freed or not: an upper bound of the peak."""

    def __init__(self, known):
        super().__init__()
        self.known, self.bytes, self.held = {t.untyped_storage()._cdata for t in known}, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.known:
                self.known.add(t.untyped_storage()._cdata)
                self.held.append(t)  # keeps its address from being reused
                self.bytes += t.untyped_storage().nbytes()
        return out


@pytest.mark.parametrize("nesterov", BOTH)
def test_the_temporaries_of_flat_foreach_are_a_twentieth_of_the_parameters(nesterov):
    shapes = [(512, 1000), (128, 128, 3, 3), *[(128, 512)] * 8, *[(512,)] * 20]
    lists = tensors(shapes)
    decays = [0.1 if len(s) > 1 else 0.0 for s in shapes]
    for step in (
        lambda: FLAT.lars(lists[:3], decays, nesterov=nesterov),
        lambda: FLAT.lamb(lists, decays, [d > 0 for d in decays], [1] * len(shapes)),
    ):
        with Allocations([t for values in lists for t in values]) as allocated:
            step()
        assert allocated.bytes < sum(t.nbytes for t in lists[0]) / 20


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


@pytest.mark.slow
@built
def test_there_is_one_pool_of_threads():
    """In a process of its own, because libraries that other tests import bring their own pools."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("only Linux lists the libraries of a process")
    subprocess.run([sys.executable, "-c", ONE_POOL], check=True, timeout=200)


@built
def test_the_environment_chooses_the_kernels(monkeypatch):
    monkeypatch.setenv("FLEETX_KERNELS", "foreach")
    assert not native.available()
    assert "FLEETX_KERNELS=foreach" in native.reason()
    monkeypatch.setenv("FLEETX_KERNELS", "compiled")
    assert native.available()
    assert native.reason() == ""
    monkeypatch.setenv("FLEETX_KERNELS", "stock")
    with pytest.raises(ValueError, match="FLEETX_KERNELS=stock: must be foreach, compiled or triton"):
        native.available()


@pytest.mark.slow
def test_without_the_library_the_reason_says_how_to_get_it(tmp_path):
    """native.py by itself, as an installation without a compiler leaves it."""
    (tmp_path / "alone.py").write_text(Path(native.__file__).read_text())
    (tmp_path / "script.py").write_text(
        "import alone, os\n"
        "assert not alone.available()\n"
        "print(alone.reason())\n"
        "os.environ['FLEETX_KERNELS'] = 'compiled'\n"
        "alone.available()\n"
    )
    done = forked_command.python(["script.py"], cwd=tmp_path)
    assert "no working C compiler" in done.stdout
    assert "reinstall" in done.stdout
    assert "RuntimeError: FLEETX_KERNELS=compiled: the compiled kernels are not installed" in done.stderr
