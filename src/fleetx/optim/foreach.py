"""The formulas in torch's foreach functions: for accelerators, and for dtypes and layouts that the CPU kernels skip.

Nothing here waits for what the device computes. Numbers are in fp32 at least, whatever the parameters are kept in. The
temporaries are a few times as large as the tensors that are computed together: 2^24 elements, or one tensor if larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]

_ELEMENTS = 1 << 24  # tensors that are computed together: the temporaries are a few times as large


def lars(
    params: list[Tensor],
    grads: list[Tensor],
    velocities: list[Tensor],
    *,
    lr: float,
    coeff: float,
    decays: list[float],
    epsilon: float,
    momentum: float,
    nesterov: bool,
    maximize: bool,
    reduce: Any = None,
) -> None:
    squares = _squares(params, grads)
    if reduce is not None:
        reduce(squares)
    p_norms, g_norms = squares.sqrt().unbind(1)
    decay = torch.tensor(decays, dtype=squares.dtype, device=squares.device)
    ratios = lr * coeff * p_norms / (g_norms + decay * p_norms + epsilon)
    rates = torch.where((decay > 0) & (p_norms > 0) & (g_norms > 0), ratios, lr)
    for run in _runs(params):
        vs = [velocities[i] for i in run]
        ps = [params[i].to(v.dtype) for i, v in zip(run, vs, strict=True)]
        ds = torch._foreach_mul(ps, [decays[i] for i in run])
        torch._foreach_add_(ds, [grads[i].to(d.dtype) for i, d in zip(run, ds, strict=True)], alpha=_sign(maximize))
        torch._foreach_mul_(ds, [rates[i].to(d.dtype) for i, d in zip(run, ds, strict=True)])
        torch._foreach_mul_(vs, momentum)
        torch._foreach_add_(vs, ds)
        if nesterov:
            torch._foreach_add_(ds, vs, alpha=momentum)
        _write([params[i] for i in run], torch._foreach_sub(ps, ds if nesterov else vs))


def lamb(
    params: list[Tensor],
    grads: list[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decays: list[float],
    adapts: list[bool],
    steps: list[float],
    maximize: bool,
    reduce: Any = None,
) -> None:
    def moments(run: list[int]) -> None:
        gs = [grads[i].to(firsts[i].dtype) for i in run]
        ms, vs = [firsts[i] for i in run], [seconds[i] for i in run]
        torch._foreach_mul_(ms, beta1)
        torch._foreach_add_(ms, gs, alpha=_sign(maximize) * (1 - beta1))
        torch._foreach_mul_(vs, beta2)
        torch._foreach_addcmul_(vs, gs, gs, 1 - beta2)

    def directions(run: list[int]) -> Tensors:
        us = torch._foreach_div([seconds[i] for i in run], [1 - beta2 ** steps[i] for i in run])
        torch._foreach_sqrt_(us)
        torch._foreach_add_(us, epsilon)
        torch._foreach_reciprocal_(us)
        torch._foreach_mul_(us, [firsts[i] for i in run])
        torch._foreach_mul_(us, [1 / (1 - beta1 ** steps[i]) for i in run])
        ps = [params[i].to(u.dtype) for i, u in zip(run, us, strict=True)]
        torch._foreach_add_(us, torch._foreach_mul(ps, [decays[i] for i in run]))
        return us

    def apply(run: list[int], us: Tensors, squares: Tensor) -> None:
        p_norms, u_norms = squares.sqrt().unbind(1)
        chosen = torch.tensor([adapts[i] for i in run], device=squares.device)
        rates = lr * torch.where(chosen & (p_norms > 0) & (u_norms > 0), p_norms / u_norms, 1.0)
        torch._foreach_mul_(us, [rate.to(u.dtype) for rate, u in zip(rates, us, strict=True)])
        ps = [params[i] for i in run]
        _write(ps, torch._foreach_sub([p.to(u.dtype) for p, u in zip(ps, us, strict=True)], us))

    runs = list(_runs(params))
    squares = []
    for run in runs:
        moments(run)
        us = directions(run)
        squares.append(_squares([params[i] for i in run], us))
        if reduce is None:
            apply(run, us, squares[-1])
    if reduce is not None:
        reduce(together := torch.cat(squares))
        for run in runs:
            apply(run, directions(run), together[run])


def _runs(params: list[Tensor]) -> Iterator[list[int]]:
    """Positions of neighbours that are computed together, so that the temporaries stay small beside the model."""
    run: list[int] = []
    size = 0
    for i, p in enumerate(params):
        if run and size + p.numel() > _ELEMENTS:
            yield run
            run, size = [], 0
        run.append(i)
        size += p.numel()
    if run:
        yield run


def _squares(*lists: Tensors) -> Tensor:
    """The squared norm of each tensor, a column for each list. They are added up in fp64 where shards meet."""
    columns = []
    for tensors in lists:
        norms = torch._foreach_norm(tensors, 2, dtype=torch.float64 if _exact(tensors) else torch.float32)
        columns.append(torch.stack(norms).double().square())
    return torch.stack(columns, dim=1)


def _exact(tensors: Tensors) -> bool:
    """fp64 costs nothing on a CPU, and an accelerator takes it for fp64 parameters alone."""
    return tensors[0].device.type == "cpu" or tensors[0].dtype is torch.float64


def _write(params: list[Tensor], values: Tensors) -> None:
    torch._foreach_copy_(params, values)


def _sign(maximize: bool) -> float:
    return -1.0 if maximize else 1.0
