"""Run scripts that were written for Paddle's static Fleet.

    import fleetx.static
    fleetx.static.install()     # from now on `import paddle` gives fleetx.paddle.api; fleetrun does this automatically

A program is an application. `minimize(loss)` records the optimizer and the strategy, which `training.py` passes to
`fleet.distribute`; `Executor.run` runs one step and fetches values by name. There is no training logic here.

    imports.py                   `import paddle` and its errors
    strategy.py prototxt.py      the strategy of a script, and its text format
    optimizers.py rates.py       optimizers and learning rates of a script
    training.py executor.py      the training state of an application; one run of its program
    feeds.py values.py           inputs; outputs, and parameters by name
    devices.py programs.py       places; the default programs
    regularization.py            weight decay and clipping
    saving.py                    fluid.io: parameters in a safetensors file
    ../api/                      the names that a Paddle script imports
"""

from fleetx.paddle.static.imports import install

__all__ = ["install"]
