"""The update rules of the oracle, in plain PyTorch: how LARS, LAMB and Muon move a parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SwitchSettings = Mapping[str, Mapping[str, Any]]  # all settings of each strategy that is on


def rule_for(model: nn.Module, optimizer: Optimizer, settings: SwitchSettings) -> Callable[[dict[str, Tensor]], None]:
    """LARS, LAMB or Muon with the options of the optimizer, or the optimizer itself. It takes gradients by name."""
    params = dict(model.named_parameters())
    names = {p: name for name, p in params.items()}
    states = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in params.items()}
    steps = dict.fromkeys(params, 0)  # that had a gradient, as torch's optimizers count them
    matrices = _hidden_matrices(model) if "muon" in settings else []

    @torch.no_grad()
    def layerwise(grads: dict[str, Tensor]) -> None:
        for group in optimizer.param_groups:
            for name in (names[p] for p in group["params"] if names[p] in grads):
                first, second = states[name]
                steps[name] += 1
                others = _adamw if "muon" in settings else _lamb if "lamb" in settings else _lars
                move = _muon if name in matrices else others
                move(params[name], grads[name], first, second, group, settings, steps[name])

    def plain(grads: dict[str, Tensor]) -> None:
        for name, p in params.items():
            p.grad = grads.get(name)
        optimizer.step()

    return layerwise if {"lars", "lamb", "muon"} & set(settings) else plain


def _lamb(p: Tensor, g: Tensor, m: Tensor, v: Tensor, group: Any, settings: SwitchSettings, steps: int) -> None:
    beta1, beta2 = group["betas"]
    m.lerp_(g, 1 - beta1)
    v.lerp_(g * g, 1 - beta2)
    u = m / (1 - beta1**steps) / ((v / (1 - beta2**steps)).sqrt() + group["eps"])
    u += settings["lamb"]["lamb_weight_decay"] * p
    p.sub_(group["lr"] * _ratio(p, u) * u)


def _muon(p: Tensor, g: Tensor, b: Tensor, _: Tensor, group: Any, settings: SwitchSettings, steps: int) -> None:
    muon = settings["muon"]
    b.lerp_(g, 1 - muon["momentum"])
    x = (g.lerp(b, muon["momentum"]) if muon["nesterov"] else b).flatten(1)
    x = x / max(float(x.norm()), 1e-7)
    for _step in range(muon["ns_steps"]):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.sub_(group["lr"] * muon["rms"] * math.sqrt(max(x.shape)) * x.view_as(p))


def _hidden_matrices(model: nn.Module) -> list[str]:
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    several = model.named_parameters(remove_duplicate=False)
    named = [(n, p) for n, p in several if p.dim() > 1 and min(p.shape[0], p[0].numel()) > 1]
    output = id(named[-1][1])
    return [n for n, p in named if id(p) not in embeddings | {output} and "embed" not in n]


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, group: Any, settings: SwitchSettings, steps: int) -> None:
    beta1, beta2 = group["betas"]
    m.lerp_(g, 1 - beta1)
    v.lerp_(g * g, 1 - beta2)
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.sub_(group["lr"] * m / (1 - beta1**steps) / ((v / (1 - beta2**steps)).sqrt() + group["eps"]))


def _lars(p: Tensor, g: Tensor, velocity: Tensor, _: Tensor, group: Any, settings: SwitchSettings, steps: int) -> None:
    lars = settings["lars"]
    decay, rate = lars["lars_weight_decay"], group["lr"]
    if p.norm() > 0 and g.norm() > 0:
        rate *= lars["lars_coeff"] * p.norm() / (g.norm() + decay * p.norm() + lars["epsilon"])
    move = rate * (g + decay * p)
    velocity.mul_(group["momentum"]).add_(move)
    p.sub_(move + group["momentum"] * velocity if group["nesterov"] else velocity)


def _ratio(p: Tensor, u: Tensor) -> float:
    return float(p.norm() / u.norm()) if p.norm() > 0 and u.norm() > 0 else 1.0
