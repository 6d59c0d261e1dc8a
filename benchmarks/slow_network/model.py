"""Parameters with the shapes of a model, a forward that costs nothing and a backward that makes up gradients.

A step is then little more than writing gradients, the optimizer and the network: the worst case for compression,
because there is no computation to overlap with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.optimizer_steps.models import Shape, shapes

SLACK = 1 << 20  # range of offsets into the noise, so that gradients differ from step to step
TITLES = {"resnet": "ResNet-50", "bert": "BERT-base", "tiny": "four small tensors"}
TINY = [(300, 100), (100,), (200, 150), (10,)]


def shapes_of(name: str) -> list[Shape]:
    return TINY if name == "tiny" else shapes(name)


class Noise:
    """Gradient-like numbers that differ between ranks and steps, at the cost of a copy."""

    def __init__(self, longest: int, seed: int):
        self._values = torch.randn(longest + SLACK, generator=torch.Generator().manual_seed(seed)).mul_(1e-3)
        self._random = random.Random(seed)

    def like(self, p: Tensor) -> Tensor:
        start = self._random.randrange(SLACK)
        return self._values[start : start + p.numel()].view_as(p).clone()


class Sized(nn.Module):
    """`model(x)` is x, and its backward gives every parameter a gradient, last layers first."""

    def __init__(self, sizes: Sequence[Shape], noise: Noise):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in sizes])
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        for p in self.layers:
            x = _Layer.apply(x, p, self.noise)
        return x

    @property
    def bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.layers)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, noise: Noise) -> Tensor:
        ctx.p, ctx.noise = p, noise
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.noise.like(ctx.p), None


def longest(sizes: Sequence[Shape]) -> int:
    return max(map(math.prod, sizes))
