"""Lars and Lamb against float64 and against plain PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import lamb_step, lars_step
from torch.nn import Parameter

from covering import cases
from fleetx.optim import Lamb, Lars

STEPS = 50
SHAPES = [(7, 5), (3,), (), (0, 4), (2, 3, 4, 4), (300, 77), (20000,), (1, 1, 1)]


def parameters(dtype=torch.float32, shapes=SHAPES, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in shapes]


def gradients(params, step):
    """Some are None or zero in some steps, and their size varies over orders of magnitude."""
    g = torch.Generator().manual_seed(100 + step)
    out = [torch.randn(p.shape, generator=g).mul(10.0 ** (i % 5 - 3)).to(p.dtype) for i, p in enumerate(params)]
    if step % 7 == 3:
        out[0] = None
    if step % 5 == 2:
        out[1] = torch.zeros_like(out[1])
    return out


def give(params, grads):
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else torch.empty_like(p).copy_(g)


def assert_reference(params, optimizer, formula, options, *, rtol, rounded=lambda x: x, rate=lambda step: None):
    """`options[i]` are those of parameter i. `rounded` rounds the reference to the dtype of the parameters."""
    values = [p.detach().double().numpy().copy() for p in params]
    states = [{} for _ in params]
    for step in range(STEPS):
        if (lr := rate(step)) is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr
        grads = gradients(params, step)
        give(params, grads)
        optimizer.step()
        for i, g in enumerate(grads):
            if g is not None:
                own = options[i] | ({} if lr is None else {"lr": lr})
                values[i] = rounded(formula(values[i], g.double().numpy(), states[i], **own))
                assert torch.equal(params[i].grad, g), "the gradient belongs to the user"
    for p, value in zip(params, values, strict=True):
        np.testing.assert_allclose(p.detach().double().numpy(), value, rtol=rtol, atol=rtol * 0.05)


def bf16(x):
    return torch.from_numpy(np.asarray(x)).to(torch.bfloat16).double().numpy()


PRECISION = {torch.float32: (2e-5, lambda x: x), torch.float64: (1e-12, lambda x: x), torch.bfloat16: (2e-2, bf16)}
KERNELS, BOTH = ["compiled", "foreach"], [False, True]


@cases(kernels=KERNELS, dtype=list(PRECISION), nesterov=BOTH, maximize=BOTH, indirect=["kernels"])
def test_fifty_steps_of_lars(kernels, dtype, nesterov, maximize):
    rtol, rounded = PRECISION[dtype]
    params = parameters(dtype)
    common = {"momentum": 0.9, "nesterov": nesterov, "maximize": maximize}
    first = {"lr": 0.3, "lars_coeff": 0.01, "weight_decay": 0.001, "epsilon": 1e-3}
    second = {"lr": 0.01, "lars_coeff": 0.001, "weight_decay": 0.0, "epsilon": 0.0}  # plain momentum
    groups = [{"params": params[::2], **first}, {"params": params[1::2], **second}]
    optimizer = Lars(groups, lr=1.0, **common)
    options = [(first, second)[i % 2] | common for i in range(len(params))]
    assert_reference(params, optimizer, lars_step, options, rtol=rtol, rounded=rounded)


@cases(kernels=KERNELS, dtype=list(PRECISION), maximize=BOTH, indirect=["kernels"])
def test_fifty_steps_of_lamb(kernels, dtype, maximize):
    rtol, rounded = PRECISION[dtype]
    params = parameters(dtype)
    common = {"betas": (0.9, 0.99), "eps": 1e-6, "maximize": maximize}
    first, second = {"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.003, "weight_decay": 0.0}
    optimizer = Lamb([{"params": params[::2], **first}, {"params": params[1::2], **second}], **common)
    options = [(first, second)[i % 2] | common for i in range(len(params))]
    assert_reference(params, optimizer, lamb_step, options, rtol=rtol, rounded=rounded)


def test_excluded_parameters_of_lars_get_plain_momentum(kernels):
    params = parameters()
    named = [(f"layer{i}.{'bias' if i % 2 else 'weight'}", p) for i, p in enumerate(params)]
    optimizer = Lars(named, lr=0.1, lars_coeff=0.01, weight_decay=0.01, exclude_from_weight_decay=["bias"])
    own = {"lr": 0.1, "momentum": 0.9, "lars_coeff": 0.01, "weight_decay": 0.01}
    options = [own | ({"weight_decay": 0.0} if i % 2 else {}) for i in range(len(params))]
    assert_reference(params, optimizer, lars_step, options, rtol=2e-5)


@pytest.mark.parametrize("always_adapt", BOTH)
def test_excluded_parameters_of_lamb_lose_decay_and_ratio(kernels, always_adapt):
    params = parameters()
    named = [(f"layer{i}.{'bias' if i % 2 else 'weight'}", p) for i, p in enumerate(params)]
    optimizer = Lamb(named, lr=0.01, exclude_from_weight_decay=["bias"], always_adapt=always_adapt)
    own = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
    out = {"weight_decay": 0.0, "adapt": always_adapt}
    assert_reference(
        params, optimizer, lamb_step, [own | (out if i % 2 else {}) for i in range(len(params))], rtol=2e-5
    )


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_a_rate_that_changes_in_every_step(kernels, kind):
    params = parameters()
    if kind is Lars:
        optimizer = Lars(params, lr=1.0, lars_coeff=0.02, weight_decay=0.01)
        options = {"momentum": 0.9, "lars_coeff": 0.02, "weight_decay": 0.01}
    else:
        optimizer = Lamb(params)
        options = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
    assert_reference(
        params, optimizer, lars_step if kind is Lars else lamb_step, [options] * len(params), rtol=2e-5,
        rate=lambda step: 0.01 * (1 - step / STEPS),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_zero_parameters_move_at_the_plain_rate(kernels, kind):
    params = [Parameter(torch.zeros(40, 3)), Parameter(torch.zeros(()))]
    if kind is Lars:
        own = {"lr": 0.1, "momentum": 0.9, "lars_coeff": 0.01, "weight_decay": 0.01}
        assert_reference(params, Lars(params, **own), lars_step, [own] * 2, rtol=2e-5)
    else:
        own = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
        assert_reference(params, Lamb(params, **own), lamb_step, [own] * 2, rtol=2e-5)


LAYOUTS = {
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
    "every second column": lambda t: torch.cat([t, t], dim=-1)[..., ::2].copy_(t),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "offset": lambda t: torch.cat([torch.zeros(1), t.flatten()])[1:].view(t.shape),
}


@cases(kernels=KERNELS, kind=[Lars, Lamb], layout=list(LAYOUTS), same_gradient_layout=BOTH, indirect=["kernels"])
def test_the_layout_in_memory_does_not_matter(kernels, kind, layout, same_gradient_layout):
    torch.manual_seed(1)
    start, grads = torch.randn(6, 5, 4, 3), torch.randn(3, 6, 5, 4, 3)
    odd, plain = Parameter(LAYOUTS[layout](start)), Parameter(start.clone())
    optimizers = [kind([p], lr=0.1, weight_decay=0.01) for p in (odd, plain)]
    for g in grads:
        odd.grad = LAYOUTS[layout](g) if same_gradient_layout else g.clone()
        plain.grad = g.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(odd.detach(), plain.detach(), rtol=1e-6, atol=1e-7)


def test_tiny_and_huge_gradients_keep_their_direction(kernels):
    """The square of 1e-25 underflows in fp32: the norm would be zero, and the rate 1e5 times too large."""
    for size in (1e-25, 1e25):
        p = Parameter(torch.ones(1000))
        p.grad = torch.full_like(p, size)
        Lars([p], lr=1.0, lars_coeff=0.001, weight_decay=1e-30).step()
        torch.testing.assert_close(p.detach(), torch.full((1000,), 0.999))


# --- without scaling --------------------------------------------------------------------------------
@cases(dtype=list(PRECISION), momentum=[0.9, 0.0], weight_decay=[0.0, 0.1], nesterov=BOTH, maximize=BOTH)
def test_lars_without_its_coefficient_is_sgd_bit_for_bit(dtype, momentum, weight_decay, nesterov, maximize):
    nesterov = nesterov and momentum > 0
    options = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov, "maximize": maximize}
    ours, theirs = parameters(dtype), parameters(dtype)
    a = Lars(ours, lr=0.1, lars_coeff=None, **options)
    b = torch.optim.SGD(theirs, lr=0.1, **options)
    assert_equal_training(ours, a, theirs, b)


@cases(dtype=list(PRECISION), weight_decay=[0.01, 0.0], maximize=BOTH)
def test_lamb_without_its_ratio_is_adamw_bit_for_bit(dtype, weight_decay, maximize):
    options = {"weight_decay": weight_decay, "maximize": maximize}
    ours, theirs = parameters(dtype), parameters(dtype)
    a = Lamb(ours, lr=0.01, eps=1e-8, adapt=False, **options)
    b = torch.optim.AdamW(theirs, lr=0.01, eps=1e-8, **options)
    assert_equal_training(ours, a, theirs, b)


def assert_equal_training(ours, a, theirs, b):
    for step in range(STEPS):
        for params, optimizer in ((ours, a), (theirs, b)):
            give(params, gradients(params, step))
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.step()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    torch.testing.assert_close(a.state_dict()["state"], b.state_dict()["state"], rtol=0, atol=0)
