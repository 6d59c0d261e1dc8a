"""Which of torch's optimizers cannot update shards."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim import Optimizer

_NEEDS_WHOLE_TENSORS = (torch.optim.Adafactor, torch.optim.Rprop)


def unsupported(optimizer: Optimizer) -> Iterator[str]:
    name = type(optimizer).__name__
    if isinstance(optimizer, _NEEDS_WHOLE_TENSORS):
        yield f"sharding does not work with {name}, which torch cannot run on shards: use another one, such as AdamW"
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        yield f"sharding does not work with {name}(fused=True), which torch cannot run on shards: remove fused=True"
