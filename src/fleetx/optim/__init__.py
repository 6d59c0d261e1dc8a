"""Optimizers for large batches, whose steps depend on each tensor as a whole. They are ordinary torch optimizers.

    from fleetx.optim import Lamb, Lars, Muon

For Lars and Lamb, `dispatch` chooses, per tensor, one of three implementations of the same formulas:

    native.py          compiled kernels (kernels.c): fp32 on the CPU
    triton_kernels.py  Triton: fp32 on a CUDA device, if they run there
    foreach.py         torch's foreach functions: any other device, dtype or layout, or if those kernels are missing
"""

from fleetx.optim.lamb import Lamb
from fleetx.optim.lars import Lars
from fleetx.optim.muon import Muon, adamw_names
from fleetx.optim.trust_ratios import TrustRatios

__all__ = ["Lamb", "Lars", "Muon", "TrustRatios", "adamw_names"]
