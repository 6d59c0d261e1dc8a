"""LARS and LAMB in Triton, for lists of fp32 tensors on a GPU. They work like kernels.c, which explains the formulas.

Three launches update all tensors of a call, however many there are: tensors are divided into chunks, and a program
finds the addresses of its chunk in a table.

    squares or moments   squared norms of each chunk, in fp64, where the square of a float is exact
    total                squared norms of each tensor: sums over its chunks in order, without atomics
    lars or lamb         the new parameters

The host waits for nothing: norms stay on the device, and tables are sent from pinned memory.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from fleetx.base.triton_kernels import OPTIONS, on, send
from fleetx.optim.foreach import AllSum, LambStep, LarsStep, Tensors

CHUNK = 8192  # elements per program
BLOCK = 1024  # elements of a chunk processed at a time


# --- device -----------------------------------------------------------------------------------------
@triton.jit
def _pointer(addresses, n, tensor, kind: tl.constexpr):
    return tl.load(addresses + kind * n + tensor).to(tl.pointer_type(tl.float32))


@triton.jit
def lars_squares_kernel(chunks, counts, addresses, numbers, sums, n, chunk: tl.constexpr, block: tl.constexpr):
    """Squares of p and g. numbers: lr, coeff, epsilon, momentum, sign; then the decay of each tensor."""
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * chunk
    count = tl.load(counts + tensor)
    if tl.load(numbers + 5 + tensor) == 0:
        count = start  # needs no norm
    p, g = _pointer(addresses, n, tensor, 0), _pointer(addresses, n, tensor, 1)
    pp = tl.zeros([block], tl.float64)
    gg = tl.zeros([block], tl.float64)
    for first in range(start, tl.minimum(count, start + chunk), block):
        at = first + tl.arange(0, block)
        weight = tl.load(p + at, mask=at < count, other=0.0).to(tl.float64)
        gradient = tl.load(g + at, mask=at < count, other=0.0).to(tl.float64)
        pp += weight * weight
        gg += gradient * gradient
    tl.store(sums + 2 * program, tl.sum(pp, 0))
    tl.store(sums + 2 * program + 1, tl.sum(gg, 0))


@triton.jit
def total_kernel(heads, sums, norms, block: tl.constexpr):
    """heads: the first chunk of each tensor, then the end."""
    tensor = tl.program_id(0)
    start, end = tl.load(heads + tensor), tl.load(heads + tensor + 1)
    one = tl.zeros([block], tl.float64)
    two = tl.zeros([block], tl.float64)
    for first in range(start, end, block):
        at = first + tl.arange(0, block)
        one += tl.load(sums + 2 * at, mask=at < end, other=0.0)
        two += tl.load(sums + 2 * at + 1, mask=at < end, other=0.0)
    tl.store(norms + 2 * tensor, tl.sum(one, 0))
    tl.store(norms + 2 * tensor + 1, tl.sum(two, 0))


@triton.jit
def lars_kernel(
    chunks, counts, addresses, numbers, norms, n, nesterov: tl.constexpr, chunk: tl.constexpr, block: tl.constexpr
):
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * chunk
    count = tl.load(counts + tensor)
    lr, decay = tl.load(numbers), tl.load(numbers + 5 + tensor)
    pp, gg = tl.load(norms + 2 * tensor), tl.load(norms + 2 * tensor + 1)
    norm = tl.sqrt(pp)
    below = tl.sqrt(gg) + decay * norm + tl.load(numbers + 2)
    scales = (decay > 0) & (pp > 0) & (gg > 0)
    local = tl.where(scales, lr * tl.load(numbers + 1) * norm / tl.where(scales, below, 1.0), lr)
    a = (local * tl.load(numbers + 4)).to(tl.float32)
    b = (local * decay).to(tl.float32)
    momentum = tl.load(numbers + 3).to(tl.float32)
    p, g, v = _pointer(addresses, n, tensor, 0), _pointer(addresses, n, tensor, 1), _pointer(addresses, n, tensor, 2)
    for first in range(start, tl.minimum(count, start + chunk), block):
        at = first + tl.arange(0, block)
        weight = tl.load(p + at, mask=at < count, other=0.0)
        step = a * tl.load(g + at, mask=at < count, other=0.0) + b * weight
        velocity = momentum * tl.load(v + at, mask=at < count, other=0.0) + step
        tl.store(v + at, velocity, mask=at < count)
        if nesterov:
            tl.store(p + at, weight - (step + momentum * velocity), mask=at < count)
        else:
            tl.store(p + at, weight - velocity, mask=at < count)


@triton.jit
def _direction(numbers, n, tensor, weight, first, second):
    """u of LAMB. numbers: lr, beta1, first1, beta2, first2, epsilon; then decay, adapt, unbias1, unbias2 per tensor."""
    epsilon, decay = tl.load(numbers + 5).to(tl.float32), tl.load(numbers + 6 + tensor).to(tl.float32)
    unbias1 = tl.load(numbers + 6 + 2 * n + tensor).to(tl.float32)
    unbias2 = tl.load(numbers + 6 + 3 * n + tensor).to(tl.float32)
    return tl.div_rn(first * unbias1, tl.sqrt_rn(second * unbias2) + epsilon) + decay * weight


@triton.jit
def lamb_moments_kernel(chunks, counts, addresses, numbers, sums, n, chunk: tl.constexpr, block: tl.constexpr):
    """The new moments and the squares of p and u. A tensor that needs no norm gets its new parameters too."""
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * chunk
    count = tl.load(counts + tensor)
    adapt = tl.load(numbers + 6 + n + tensor) != 0
    at_once = tl.where(adapt, start, count)  # parameters before this position are finished here
    lr = tl.load(numbers).to(tl.float32)
    beta1, first1 = tl.load(numbers + 1).to(tl.float32), tl.load(numbers + 2).to(tl.float32)
    beta2, first2 = tl.load(numbers + 3).to(tl.float32), tl.load(numbers + 4).to(tl.float32)
    p, g = _pointer(addresses, n, tensor, 0), _pointer(addresses, n, tensor, 1)
    m, v = _pointer(addresses, n, tensor, 2), _pointer(addresses, n, tensor, 3)
    pp = tl.zeros([block], tl.float64)
    uu = tl.zeros([block], tl.float64)
    for first in range(start, tl.minimum(count, start + chunk), block):
        at = first + tl.arange(0, block)
        inside = at < count
        weight, gradient = tl.load(p + at, mask=inside, other=0.0), tl.load(g + at, mask=inside, other=0.0)
        x = beta1 * tl.load(m + at, mask=inside, other=0.0) + first1 * gradient
        y = beta2 * tl.load(v + at, mask=inside, other=0.0) + first2 * (gradient * gradient)
        u = _direction(numbers, n, tensor, weight, x, y)
        tl.store(m + at, x, mask=inside)
        tl.store(v + at, y, mask=inside)
        tl.store(p + at, weight - lr * u, mask=at < at_once)
        wide, direction = weight.to(tl.float64), u.to(tl.float64)
        pp += wide * wide
        uu += direction * direction
    tl.store(sums + 2 * program, tl.where(adapt, tl.sum(pp, 0), 0.0))
    tl.store(sums + 2 * program + 1, tl.where(adapt, tl.sum(uu, 0), 0.0))


@triton.jit
def lamb_kernel(chunks, counts, addresses, numbers, norms, n, chunk: tl.constexpr, block: tl.constexpr):
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * chunk
    count = tl.load(counts + tensor)
    if tl.load(numbers + 6 + n + tensor) == 0:
        count = start  # already done
    pp, uu = tl.load(norms + 2 * tensor), tl.load(norms + 2 * tensor + 1)
    scales = (pp > 0) & (uu > 0)
    ratio = tl.where(scales, tl.sqrt(pp) / tl.where(scales, tl.sqrt(uu), 1.0), 1.0)
    rate = (tl.load(numbers) * ratio).to(tl.float32)
    p, m, v = _pointer(addresses, n, tensor, 0), _pointer(addresses, n, tensor, 2), _pointer(addresses, n, tensor, 3)
    for first in range(start, tl.minimum(count, start + chunk), block):
        at = first + tl.arange(0, block)
        inside = at < count
        weight = tl.load(p + at, mask=inside, other=0.0)
        x, y = tl.load(m + at, mask=inside, other=0.0), tl.load(v + at, mask=inside, other=0.0)
        tl.store(p + at, weight - rate * _direction(numbers, n, tensor, weight, x, y), mask=inside)


# --- host -------------------------------------------------------------------------------------------
def lars(params: Tensors, grads: Tensors, velocities: Tensors, step: LarsStep, reduce: AllSum | None = None) -> None:
    """Like native.lars, for tensors on a GPU."""
    numbers = [step.lr, step.coeff, step.epsilon, step.momentum, -1.0 if step.maximize else 1.0, *step.decays]
    _run(lars_squares_kernel, lars_kernel, [params, grads, velocities], numbers, reduce, nesterov=bool(step.nesterov))


def lamb(
    params: Tensors,
    grads: Tensors,
    firsts: Tensors,
    seconds: Tensors,
    step: LambStep,
    reduce: AllSum | None = None,
) -> None:
    """Like native.lamb, for tensors on a GPU."""
    beta1, beta2, sign = step.beta1, step.beta2, -1 if step.maximize else 1
    numbers = [step.lr, beta1, sign * (1 - beta1), beta2, 1 - beta2, step.epsilon, *step.decays, *step.adapts]
    numbers += [1 / (1 - beta1**n) for n in step.steps] + [1 / (1 - beta2**n) for n in step.steps]
    _run(lamb_moments_kernel, lamb_kernel, [params, grads, firsts, seconds], numbers, reduce)


def _run(
    first: Any, second: Any, lists: list[Tensors], numbers: list[float], reduce: AllSum | None, **options: bool
) -> None:
    params = lists[0]
    if not params:
        return
    device, n = params[0].device, len(params)
    counts, heads, chunks, programs = _table(tuple(t.numel() for t in params), CHUNK, device)
    addresses = send(np.array([[t.data_ptr() for t in tensors] for tensors in lists], np.int64), device)
    values = send(np.array(numbers, np.float64), device)
    sums = torch.empty(programs, 2, dtype=torch.float64, device=device)
    norms = torch.empty(n, 2, dtype=torch.float64, device=device)
    sizes = {"chunk": CHUNK, "block": BLOCK, "num_warps": 4, **OPTIONS}
    with on(device):
        if programs:
            first[(programs,)](chunks, counts, addresses, values, sums, n, **sizes)
        total_kernel[(n,)](heads, sums, norms, block=BLOCK, num_warps=4, **OPTIONS)
        if reduce is not None:
            reduce(norms)
        if programs:
            second[(programs,)](chunks, counts, addresses, values, norms, n, **options, **sizes)
    # torch does not see that the parameters changed, and must reject a backward through an older graph.
    increment_version(params)


@functools.lru_cache(maxsize=64)
def _table(counts: tuple[int, ...], chunk: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:
    """The elements of each tensor, its first chunk, and the tensor and number of each chunk; kept on the device."""
    sizes = np.array(counts, np.int64)
    per_tensor = (sizes + chunk - 1) // chunk
    heads = np.concatenate([[0], per_tensor.cumsum()])
    tensors = np.repeat(np.arange(len(counts)), per_tensor)
    chunks = np.stack([tensors, np.arange(heads[-1]) - heads[tensors]], axis=1).astype(np.int32)
    return send(sizes, device), send(heads, device), send(chunks, device), int(heads[-1])
