"""Seconds and bytes of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.recompute.methods import Active, Method
from fleetx.measure import allocator
from fleetx.measure.tracker import bytes_of

Inputs = dict[str, Tensor]


def adamw(module: nn.Module) -> Optimizer:
    return AdamW(module.parameters(), lr=1e-5)


def forward_backward(module: nn.Module, inputs: Inputs, active: Active, *, bf16: bool = False) -> None:
    with active(), torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
        out = module(**inputs)
    out.loss.backward()


def peak(module: nn.Module, optimizer: Optimizer, inputs: Inputs, active: Active) -> int:
    if not optimizer.state:
        once(module, optimizer, inputs, active)
    return peak_and_seconds(module, optimizer, inputs, active)[0]


def peak_and_seconds(
    module: nn.Module, optimizer: Optimizer, inputs: Inputs, active: Active, *, bf16: bool = False
) -> tuple[int, float]:
    """The peak of a step according to the allocator, including what is always there; and its seconds."""
    took: list[float] = []
    state = [s for values in optimizer.state.values() for s in values.values() if isinstance(s, Tensor)]
    fixed = bytes_of([*module.parameters(), *module.buffers(), *inputs.values(), *state])

    def step() -> None:
        took.append(once(module, optimizer, inputs, active, bf16=bf16))

    return fixed + allocator.peak(step, torch.device("cpu")), took[0]


def seconds(module: nn.Module, inputs: Inputs, methods: Sequence[Method], rounds: int) -> dict[str, list[float]]:
    """Time forward and backward; the methods alternate, in order and in reverse."""
    found: dict[str, list[float]] = {method.name: [] for method in methods}
    for number in range(rounds + 1):
        for method in methods if number % 2 else reversed(methods):
            begun = time.perf_counter()
            forward_backward(module, inputs, method.active)
            if number:  # the first round warms up
                found[method.name].append(time.perf_counter() - begun)
            module.zero_grad()
    return found


def once(module: nn.Module, optimizer: Optimizer, inputs: Inputs, active: Active, *, bf16: bool = False) -> float:
    """Run a whole step and return its seconds."""
    begun = time.perf_counter()
    forward_backward(module, inputs, active, bf16=bf16)
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begun


Row = dict[str, Any]
