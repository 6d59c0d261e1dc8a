"""Optimizers for large batches, whose steps depend on each tensor as a whole. They are ordinary torch optimizers.

    from fleetx.optim import Lamb, Lars, Muon

For Lars and Lamb, `dispatch` chooses, per tensor, one of two implementations of the same formulas:

    native.py   compiled kernels (kernels.c): fp32 on the CPU
    foreach.py  torch's foreach functions: every other device, dtype and layout, and without the compiled kernels
"""

from fleetx.optim.lamb import Lamb
from fleetx.optim.lars import Lars
from fleetx.optim.muon import Muon, adamw_names

__all__ = ["Lamb", "Lars", "Muon", "adamw_names"]
