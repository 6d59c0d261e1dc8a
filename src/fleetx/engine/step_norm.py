"""The norm of one step's gradient on this rank, before it is merged with other steps or reduced between ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm


class StepNorm:
    """Measured where a part asks for it. The value stays on the device.

    If a round merges steps, it is the gradient of its first step, which the gate withholds. Otherwise it is what the
    buckets of the reduction hold before they are sent.
    """

    def __init__(self) -> None:
        self.every = 0  # rounds between two measurements; 0: no part asks
        self.square: Tensor | None = None  # of the current round
        self.backwards = 0  # in the current round

    def due(self, round: int) -> bool:
        return self.every > 0 and round % self.every == 0

    @torch.no_grad()
    def add(self, grads: list[Tensor], factor: float) -> None:
        """More of the gradient, which is still multiplied by this factor."""
        square = get_total_norm(grads).double().square() / factor**2
        self.square = square if self.square is None else self.square + square

    def begin_backward(self) -> None:
        """The buckets of several backwards in one step do not add up to a gradient."""
        self.backwards += 1
        self.square = None

    def end_round(self) -> None:
        self.square, self.backwards = None, 0
