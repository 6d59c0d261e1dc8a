"""paddle.fluid.regularizer."""

from __future__ import annotations

from fleetx.static import clips
from fleetx.static.covered import not_covered

__all__ = ["L2Decay", "L2DecayRegularizer"]

__getattr__ = not_covered(__name__)


class L2DecayRegularizer(clips.L2Decay):
    def __init__(self, regularization_coeff: float = 0.0):
        super().__init__(regularization_coeff)


L2Decay = L2DecayRegularizer
