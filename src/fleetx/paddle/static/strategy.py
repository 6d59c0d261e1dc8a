"""The strategy that Paddle scripts use: that of fleetx.fleet, plus the names of Fleet 1.x.

In Fleet 1.x a strategy was a BuildStrategy with a few switches, and scripts kept using those names with Fleet 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetx import strategy
from fleetx.applications import Application, Variable
from fleetx.comm.world import World
from fleetx.errors import StrategyError
from fleetx.optim import parameter_names
from fleetx.strategy import ignored

if TYPE_CHECKING:
    from fleetx.paddle.static.optimizers import PaddleOptimizer

_OFF = tuple(name for name in ignored.UNSUPPORTED if not name.endswith("_configs"))
_RENAMED = {
    "exec_strategy": "execution_strategy",
    "use_amp": "amp",
    "forward_recompute": "recompute",
    "use_local_sgd": "localsgd",
}
_SETTINGS = {
    "amp_loss_scaling": ("amp_configs", "init_loss_scaling"),
    "recompute_checkpoints": ("recompute_configs", "checkpoints"),
}
_GRAPH = tuple(field.name for field in dataclasses.fields(ignored.BuildStrategy))
_CHOICES: dict[str, tuple[Any, ...]] = {  # the first is the default
    "mode": ("nccl2", "collective"),
    "collective_mode": (None, "grad_allreduce", "local_sgd"),
    "use_dist_fc": (False,),
}


class PaddleStrategy(strategy.DistributedStrategy):
    """paddle.distributed.fleet.DistributedStrategy, and that of paddle.fluid.incubate.fleet.collective."""

    def __init__(self, **declared: Any):
        object.__setattr__(self, "_notes", {})
        object.__setattr__(self, "_chosen", {name: values[0] for name, values in _CHOICES.items()})
        super().__init__(**declared)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OFF and value is False:  # turning off what is not supported is fine
            return
        if name in _GRAPH:
            setattr(self.build_strategy, name, value)
        elif name in _SETTINGS:
            configs, key = _SETTINGS[name]
            value = [one.name if isinstance(one, Variable) else one for one in value] if key == "checkpoints" else value
            getattr(self, configs)[key] = value
        elif name in _CHOICES:
            self._choose(name, value)
        else:
            super().__setattr__(_RENAMED.get(name, name), value)

    def _choose(self, name: str, value: Any) -> None:
        if value not in _CHOICES[name]:
            known = " and ".join(map(repr, _CHOICES[name]))
            server = ": parameter servers are not supported" if name == "mode" else ""
            raise StrategyError(f"{name} = {value!r}{server}; fleetx supports {known}")
        self._chosen[name] = value
        if name == "collective_mode":
            self.localsgd = value == "local_sgd"

    def __getattr__(self, name: str) -> Any:
        if name in _OFF:
            return False
        if name in _GRAPH:
            return getattr(self.build_strategy, name)
        if name in _SETTINGS:
            configs, key = _SETTINGS[name]
            return getattr(self, configs)[key]
        return self._chosen[name] if name in _CHOICES else super().__getattr__(_RENAMED.get(name, name))

    def note(self, name: str, reason: str) -> None:
        """Record that a setting has no effect. Reported to the script and by `explain`."""
        self._notes[name] = reason

    def without_meaning(self) -> Iterator[tuple[str, str]]:
        yield from super().without_meaning()
        yield from self._notes.items()

    def save_to_prototxt(self, path: str | Path) -> None:
        """Write what was set, in Protobuf's text format."""
        from fleetx.paddle.static import prototxt

        Path(path).write_text(prototxt.write(self.declared()), encoding="utf-8")

    def load_from_prototxt(self, path: str | Path) -> None:
        """Apply the settings in the file and keep all others. Unlike in Paddle, a list replaces the previous one."""
        from fleetx.paddle.static import prototxt

        try:
            for name, value in prototxt.read(Path(path).read_text(encoding="utf-8")).items():
                setattr(self, name, value)
        except OSError as error:
            raise StrategyError(f"{path}: {error.strerror}") from None
        except StrategyError as error:
            raise StrategyError([f"{path}: {problem}" for problem in error.problems]) from None


def of_paddle(given: strategy.DistributedStrategy) -> PaddleStrategy:
    """Convert a strategy to a PaddleStrategy."""
    return given if isinstance(given, PaddleStrategy) else PaddleStrategy(**given.declared())


def relax(declared: PaddleStrategy, recipe: PaddleOptimizer, application: Application, world: World) -> None:
    """Drop harmless settings that Paddle accepts, with a notice, where `fleet.distribute` would raise an error."""
    for part in ("lars", "lamb"):
        if getattr(declared, part):
            _leave_out_patterns(declared, part, application)
            if recipe.decay:
                declared.note(
                    f"the weight decay of the optimizer, {recipe.decay:g}",
                    f"{part} includes its own, {part}_configs['{part}_weight_decay']",
                )
                recipe.decay = 0.0
    if declared.use_hierarchical_allreduce:
        name = "hierarchical_allreduce_inter_nranks"
        largest = max((world.hosts().count(host) for host in world.hosts()), default=1)
        if (size := getattr(declared, name)) and size > largest:
            workers = f"{largest} worker{'s' if largest > 1 else ''}"
            declared.note(f"{name} = {size}", f"a node has {workers}, and each node is one group")
            setattr(declared, name, 1)  # the default: all workers of a node


def _leave_out_patterns(declared: PaddleStrategy, part: str, application: Application) -> None:
    settings, key = getattr(declared, f"{part}_configs"), "exclude_from_weight_decay"
    params = list(application.parameters())
    for pattern in list(settings[key]):
        if pattern and not parameter_names.positions(application, [pattern], params):
            declared.note(f"{pattern!r} in {part}_configs[{key!r}]", "no parameter has it in its name")
            settings[key] = [other for other in settings[key] if other != pattern]
