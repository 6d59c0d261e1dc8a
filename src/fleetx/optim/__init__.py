"""Optimizers for large batches, which scale the step of each tensor. They are ordinary torch optimizers.

    from fleetx.optim import Lamb, Lars

`dispatch` chooses, per tensor, one of two implementations of the same formulas:

    native.py   compiled kernels (kernels.c): fp32 on the CPU
    foreach.py  torch's foreach functions: every other device, dtype and layout, and without the compiled kernels
"""

from fleetx.optim.lamb import Lamb
from fleetx.optim.lars import Lars

__all__ = ["Lamb", "Lars"]
