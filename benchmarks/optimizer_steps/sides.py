"""Optimizers of fleetx, torch and two other libraries, with parameters and gradients."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.frame import CannotRunError
from benchmarks.optimizer_steps.models import Shape, excluded

# Rates so small that a hundred steps hardly change the parameters, so that all are timed on similar numbers.
LARS = {"lr": 0.01, "momentum": 0.9}
LAMB = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6}
LARS_DECAY, LAMB_DECAY, COEFFICIENT = 5e-4, 0.01, 0.001

Made = tuple[list[nn.Parameter], Optimizer]


def parameters(shapes: Iterable[Shape]) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    made = []
    for shape in shapes:
        p = nn.Parameter(torch.empty(shape).uniform_(-0.05, 0.05, generator=g))
        p.grad = torch.empty(shape).uniform_(-0.01, 0.01, generator=g)
        made.append(p)
    return made


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters with decay and scaling, and parameters without."""
    kept = [p for p in params if not excluded(tuple(p.shape))]
    others = [p for p in params if excluded(tuple(p.shape))]
    return [{"params": kept}, {"params": others, "weight_decay": 0.0}]


def fleetx(optimizer: str, shapes: list[Shape]) -> Made:
    from fleetx.optim import Lamb, Lars, native

    try:
        native.available()
    except RuntimeError as error:  # FLEETX_KERNELS=compiled, but they are not installed
        raise CannotRunError(str(error)) from None
    params = parameters(shapes)
    # By name, like strategy.lars and strategy.lamb: a group with adapt=False would run torch's AdamW.
    named = [(f"{i}.{'plain' if excluded(tuple(p.shape)) else 'scaled'}", p) for i, p in enumerate(params)]
    if optimizer == "lars":
        options = LARS | {"lars_coeff": COEFFICIENT, "weight_decay": LARS_DECAY}
        return params, Lars(named, **options, exclude_from_weight_decay=["plain"])
    return params, Lamb(named, **LAMB, weight_decay=LAMB_DECAY, exclude_from_weight_decay=["plain"])


def torch_adamw(optimizer: str, shapes: list[Shape]) -> Made:
    params = parameters(shapes)
    return params, torch.optim.AdamW(groups(params), **LAMB, weight_decay=LAMB_DECAY, fused=True)


MUON = {"lr": 1e-4, "weight_decay": LAMB_DECAY, "momentum": 0.95, "nesterov": True, "ns_steps": 5}
HIDDEN = {(768, 768), (3072, 768), (768, 3072)}  # of BERT: what Muon updates


class Both:
    """torch's Muon takes matrices only, so AdamW updates the rest."""

    def __init__(self, *optimizers: Optimizer):
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


def muon(optimizer: str, shapes: list[Shape]) -> Made:
    """fleetx's, which divides the matrices between the ranks if there are several. optimizer: "muon" or "muon_bf16"."""
    import torch.distributed as dist

    from fleetx.optim import Muon

    params = parameters(shapes)
    named = [(f"{i}.{'hidden' if tuple(p.shape) in HIDDEN else 'other'}", p) for i, p in enumerate(params)]
    made = Muon(named, **MUON, bf16=optimizer == "muon_bf16", adamw=["other"])
    if dist.is_initialized() and dist.get_world_size() > 1:
        made.replicas = dist.group.WORLD
    return params, made


def torch_muon(optimizer: str, shapes: list[Shape]) -> tuple[list[nn.Parameter], Both]:
    """In bfloat16, and every rank orthogonalizes every matrix: torch's own has no other way."""
    params = parameters(shapes)
    hidden = [p for p in params if tuple(p.shape) in HIDDEN]
    others = [p for p in params if tuple(p.shape) not in HIDDEN]
    matrices = torch.optim.Muon(hidden, **MUON, adjust_lr_fn="match_rms_adamw")
    return params, Both(matrices, torch.optim.AdamW(others, lr=1e-4, weight_decay=LAMB_DECAY, fused=True))


def timm(optimizer: str, shapes: list[Shape]) -> Made:
    """The same formulas as ours: a group without decay is not scaled either."""
    params = parameters(shapes)
    if optimizer == "lars":
        made = _timm("lars").Lars(groups(params), **LARS, trust_coeff=COEFFICIENT, weight_decay=LARS_DECAY, eps=0.0)
    else:
        made = _timm("lamb").Lamb(groups(params), **LAMB, weight_decay=LAMB_DECAY, max_grad_norm=None)
    return params, made


def pytorch_optimizer(optimizer: str, shapes: list[Shape]) -> Made:
    """Its LAMB has no bias correction and scales everything; its LARS goes by the number of dimensions."""
    try:
        peers = importlib.import_module("pytorch_optimizer")
    except ImportError as error:
        raise CannotRunError(f"{error}: pip install --no-deps pytorch_optimizer==4.1.0") from None
    params = parameters(shapes)
    if optimizer == "lars":
        made = peers.LARS(groups(params), **LARS, trust_coefficient=COEFFICIENT, weight_decay=LARS_DECAY)
    else:
        made = peers.Lamb(groups(params), **LAMB, weight_decay=LAMB_DECAY, weight_decouple=False)
    return params, made


def _timm(module: str) -> Any:
    """A file of timm.optim. timm itself cannot be imported without torchvision."""
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        raise CannotRunError("timm is not installed: pip install --no-deps timm==1.0.30")
    if "timm_optim" not in sys.modules:
        package = types.ModuleType("timm_optim")
        package.__path__ = [f"{spec.submodule_search_locations[0]}/optim"]
        sys.modules["timm_optim"] = package
    return importlib.import_module(f"timm_optim.{module}")


def assert_same_step(optimizer: str, theirs: Callable[[str, list[Shape]], Made]) -> None:
    """Check on a few small tensors that both compute the same, so that comparing their times makes sense."""
    shapes: list[Shape] = [(30, 20), (7,), (4, 3, 2, 2)]
    (p, ours), (q, peer) = fleetx(optimizer, shapes), theirs(optimizer, shapes)
    for _ in range(3):
        for x, y in zip(p, q, strict=True):
            y.grad.copy_(x.grad)  # the peer may have overwritten it
        ours.step(), peer.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert not any(torch.equal(x, y) for x, y in zip(p, parameters(shapes), strict=True)), "nothing was updated"
