"""paddle.fluid.optimizer: Paddle 2's optimizers with fluid's argument names, each under its long and its short name."""

from fleetx.paddle.api import optimizer
from fleetx.paddle.api.optimizer import with_arguments
from fleetx.paddle.static.optimizers import FLUID_NAMES

__all__ = [
    "SGD",
    "Adam",
    "AdamOptimizer",
    "AdamW",
    "Lamb",
    "LambOptimizer",
    "LarsMomentum",
    "LarsMomentumOptimizer",
    "Momentum",
    "MomentumOptimizer",
    "SGDOptimizer",
]

SGD = SGDOptimizer = with_arguments(optimizer.SGD, renamed=FLUID_NAMES, required=["learning_rate"])
Momentum = MomentumOptimizer = with_arguments(
    optimizer.Momentum, renamed=FLUID_NAMES, required=["learning_rate", "momentum"]
)
Adam = AdamOptimizer = with_arguments(optimizer.Adam, renamed=FLUID_NAMES)
AdamW = with_arguments(
    optimizer.AdamW, renamed={"parameter_list": "parameters"}, without=["apply_decay_param_fun", "lazy_mode"]
)
Lamb = LambOptimizer = with_arguments(optimizer.FluidLamb, renamed=FLUID_NAMES)
LarsMomentum = LarsMomentumOptimizer = with_arguments(
    optimizer.FluidLarsMomentum, renamed=FLUID_NAMES, required=["learning_rate", "momentum"]
)
