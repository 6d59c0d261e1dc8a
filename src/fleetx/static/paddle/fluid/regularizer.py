"""paddle.fluid.regularizer."""

from __future__ import annotations

from fleetx.static.clips import L2Decay
from fleetx.static.covered import not_covered

__all__ = ["L2Decay", "L2DecayRegularizer"]

__getattr__ = not_covered(__name__)


class L2DecayRegularizer(L2Decay):
    def __init__(self, regularization_coeff: float = 0.0):
        super().__init__(regularization_coeff)
