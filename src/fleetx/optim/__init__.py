"""Optimizers for large batches: every tensor gets a rate of its own. Ordinary `torch.optim.Optimizer`s, good alone.

    from fleetx.optim import Lamb, Lars

Three ways to compute the same numbers, chosen for each tensor by `paths`:

    native.py   the compiled kernels (kernels.c): fp32 on the CPU
    stock.py    torch's own kernels in cache-sized pieces: fp32 on the CPU where the others were not built
    foreach.py  torch's foreach functions: every other device, dtype and layout
"""

from fleetx.optim.lamb import Lamb
from fleetx.optim.lars import Lars

__all__ = ["Lamb", "Lars"]
