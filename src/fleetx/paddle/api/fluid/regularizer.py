"""paddle.fluid.regularizer."""

from __future__ import annotations

from fleetx.paddle.static import regularization

__all__ = ["L2Decay", "L2DecayRegularizer"]


class L2DecayRegularizer(regularization.L2Decay):
    def __init__(self, regularization_coeff: float = 0.0):
        super().__init__(regularization_coeff)


L2Decay = L2DecayRegularizer
