"""The static front: scripts that were written for Paddle's static Fleet run on fleetx.

    import fleetx.static
    fleetx.static.install()     # from here on `import paddle` finds fleetx.static.paddle; fleetrun does this by itself

A program is an application. `minimize(loss)` describes its optimizer and strategy, which `training.py` gives to
`fleet.distribute`; `Executor.run` runs one step of it and fetches by name. There is no training logic here.

    imports.py covered.py        `import paddle`, and what is said where a name is not covered
    optimizers.py rates.py       optimizers and learning rates as a script describes them
    training.py executor.py      what has become of an application; one run of it
    feeds.py values.py scope.py  what goes in; what comes out, and parameters by name
    places.py programs.py        devices; the default programs
    clips.py graph_settings.py   decay and clipping; settings without a meaning
    paddle/                      the names that a Paddle script imports
"""

from fleetx.paddle.static.imports import install

__all__ = ["install"]
