"""What ranks have not sent yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def mean_of(kept: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean over these ranks, by name: with any number of ranks, the mean of what is sent later is the same."""
    made = {name: torch.zeros_like(t) for one in kept for name, t in one.items()}
    for name, total in made.items():
        for one in kept:
            if name in one:
                total += one[name]
        total /= len(kept)
    return made
