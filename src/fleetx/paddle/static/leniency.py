"""What Paddle lets pass and what does no harm: left out with a notice, which `explain` repeats.

Only scripts that were written for Paddle are treated so. `fleet.distribute` raises an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetx.applications import Application
from fleetx.comm.world import World
from fleetx.optim import exclusion
from fleetx.paddle.static.strategy import PaddleStrategy

if TYPE_CHECKING:
    from fleetx.paddle.static.optimizers import PaddleOptimizer


def relax(strategy: PaddleStrategy, recipe: PaddleOptimizer, application: Application, world: World) -> None:
    for part in ("lars", "lamb"):
        if getattr(strategy, part):
            _leave_out_patterns(strategy, part, application)
            if recipe.decay:
                strategy.note(
                    f"the weight decay of the optimizer, {recipe.decay:g}",
                    f"{part} includes its own, {part}_configs['{part}_weight_decay']",
                )
                recipe.decay = 0.0
    if strategy.use_hierarchical_allreduce:
        name = "hierarchical_allreduce_inter_nranks"
        largest = max((world.hosts().count(host) for host in world.hosts()), default=1)
        if (size := getattr(strategy, name)) and size > largest:
            workers = f"{largest} worker{'s' if largest > 1 else ''}"
            strategy.note(f"{name} = {size}", f"a node has {workers}, and each node is one group")
            setattr(strategy, name, 1)  # the default: as many as there are on a node


def _leave_out_patterns(strategy: PaddleStrategy, part: str, application: Application) -> None:
    settings, key = getattr(strategy, f"{part}_configs"), "exclude_from_weight_decay"
    params = list(application.parameters())
    for pattern in list(settings[key]):
        if pattern and not exclusion.positions(application, [pattern], params):
            strategy.note(f"{pattern!r} in {part}_configs[{key!r}]", "no parameter has it in its name")
            settings[key] = [other for other in settings[key] if other != pattern]
