"""Executor.run: one run of a program, and what was asked of it by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetx import fleet
from fleetx.applications import Parameter, Program, Variable
from fleetx.applications.not_covered import not_covered_by
from fleetx.comm.session import current
from fleetx.errors import UsageError
from fleetx.paddle.static import devices, feeds, training
from fleetx.paddle.static.programs import default_main_program
from fleetx.paddle.static.scope import Scope
from fleetx.paddle.static.values import as_numpy, whole

Fetched = Variable | str


class Executor:
    def __init__(self, place: devices.Place | None = None):
        if not isinstance(place, devices.CPUPlace | devices.CUDAPlace | None):
            raise UsageError(f"Executor takes a place, such as fluid.CUDAPlace(0), not {place!r}")
        self.place = place

    def run(
        self,
        program: Program | None = None,
        feed: Any = None,
        fetch_list: Sequence[Fetched] | Fetched | None = None,
        *,
        scope: Scope | None = None,
        return_numpy: bool = True,
        use_program_cache: bool = False,
    ) -> list[Any]:
        """A step of training for a main program that was minimized, a forward for a clone for test.

        fetch_list names outputs, inputs and parameters; these are as they are after the step. There is one scope.
        Without return_numpy the values are tensors.
        """
        if use_program_cache:
            devices.say_once("no meaning here: use_program_cache (there is no program to prepare)")
        program = default_main_program() if program is None else program
        if not isinstance(program, Program):
            raise UsageError(f"Executor.run takes a program, such as model.main_prog, not {program!r}")
        if not isinstance(scope, Scope | None):
            raise UsageError(f"Executor.run takes fluid.global_scope(), or no scope, not {scope!r}")
        application = program.application
        if self.place is not None and current().world is not None:
            self.place.check(fleet.device())
        if program.kind == "startup":
            if feed or fetch_list:
                raise UsageError("the startup program has neither inputs nor outputs: leave feed and fetch_list out")
            training.start(application)
            return []
        training.check_can_run(program)
        names = _names(program, fetch_list)
        variables = _variables(program, names)
        run = training.step if program.kind == "main" else training.evaluate
        fed = feeds.tensors(application, feed)
        values = fed | run(application, fed)
        found = [
            whole(application, name) if isinstance(variable, Parameter) else values[name]
            for name, variable in zip(names, variables, strict=True)
        ]
        return [as_numpy(value) for value in found] if return_numpy else found

    def close(self) -> None:
        """Nothing is held."""

    __getattr__ = not_covered_by("paddle.fluid.Executor", ("run", "close"))


def _names(program: Program, fetch_list: Any) -> list[str]:
    if fetch_list is None:
        return []
    items = [fetch_list] if isinstance(fetch_list, Fetched) else fetch_list
    if not isinstance(items, list | tuple):
        raise UsageError(f"fetch_list must be a list of names and variables, not {fetch_list!r}")
    for item in items:
        if not isinstance(item, Fetched):
            raise UsageError(f"fetch_list takes names and variables, such as model.loss, not {item!r}")
        if isinstance(item, Variable) and item.application is not program.application:
            raise UsageError(f"{item.name!r} in fetch_list belongs to another model than the program that is run")
    return [item.name if isinstance(item, Variable) else item for item in items]


def _variables(program: Program, names: list[str]) -> list[Variable]:
    """What the names stand for; refused before anything is trained."""
    found = program.variables(names) if names else []
    alone = program.application.loss.name
    if training.divided(program.application):
        outputs = {variable.name for variable in program.outputs} - {alone}
        if others := [name for name in names if name in outputs]:
            raise UsageError(
                f"a pipeline hands back its loss alone, and not {others[0]!r}: leave that out of fetch_list"
            )
    return found
