"""The formulas in float64 numpy, independent of the library."""

from __future__ import annotations

import numpy as np


def norm(x):
    return np.sqrt((x * x).sum())


def lars_step(p, g, state, *, lr, momentum, lars_coeff, weight_decay, epsilon=0.0, nesterov=False, maximize=False):
    if maximize:
        g = -g
    local = lr
    if weight_decay > 0 and norm(p) > 0 and norm(g) > 0:
        local = lr * lars_coeff * norm(p) / (norm(g) + weight_decay * norm(p) + epsilon)
    d = local * (g + weight_decay * p)
    v = state["v"] = momentum * state.get("v", 0.0) + d
    return p - (d + momentum * v) if nesterov else p - v


def lamb_step(p, g, state, *, lr, betas, eps, weight_decay, adapt=True, maximize=False):
    if maximize:
        g = -g
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * g
    v = state["v"] = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * g * g
    u = (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + weight_decay * p
    ratio = norm(p) / norm(u) if adapt and norm(p) > 0 and norm(u) > 0 else 1.0
    return p - lr * ratio * u
