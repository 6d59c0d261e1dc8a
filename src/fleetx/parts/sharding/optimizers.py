"""Which of torch's optimizers cannot update shards."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from fleetx.errors import NOT_BUILT

_NEEDS_WHOLE_TENSORS = (torch.optim.Adafactor, torch.optim.Rprop)


def unsupported(optimizer: Optimizer) -> Iterator[str]:
    name = type(optimizer).__name__
    if isinstance(optimizer, _NEEDS_WHOLE_TENSORS):
        yield f"{name} on shards {NOT_BUILT} in torch: use another optimizer, such as AdamW, or turn sharding off"
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        yield f"{name}(fused=True) on shards {NOT_BUILT} in torch: remove fused=True, or turn sharding off"
