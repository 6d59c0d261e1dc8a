"""Executor.run: one run of a program, and what was asked of it by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fleetx import fleet
from fleetx.applications import Application, Parameter, Program, Variable
from fleetx.errors import UsageError
from fleetx.static import feeds, places, training
from fleetx.static.covered import not_covered_by
from fleetx.static.programs import default_main_program
from fleetx.static.scope import Scope
from fleetx.static.values import Held, as_numpy


class Executor:
    def __init__(self, place: places.Place | None = None):
        if not isinstance(place, places.CPUPlace | places.CUDAPlace | None):
            raise UsageError(f"Executor takes a place, such as fluid.CUDAPlace(0), not {place!r}")
        self.place = place

    def run(
        self,
        program: Program | None = None,
        feed: Any = None,
        fetch_list: Sequence[Variable | str] | None = None,
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
            places.say_once("no meaning here: use_program_cache (there is no program to prepare)")
        program = default_main_program() if program is None else program
        if not isinstance(program, Program):
            raise UsageError(f"Executor.run takes a program, such as model.main_prog, not {program!r}")
        application = program.application
        if self.place is not None and fleet._world is not None:
            self.place.check(fleet.device())
        if program.kind == "startup":
            if feed or fetch_list:
                raise UsageError("the startup program has neither inputs nor outputs: leave feed and fetch_list out")
            training.start(application)
            return []
        training.check_can_run(program)
        wanted = [self._wanted(program, item) for item in fetch_list or ()]
        run = training.step if program.kind == "main" else training.evaluate
        fed = feeds.tensors(application, feed)
        outputs = run(application, fed)
        found = [self._fetched(application, name, fed | outputs) for name in wanted]
        return [as_numpy(value) for value in found] if return_numpy else found

    def close(self) -> None:
        """Nothing is held."""

    __getattr__ = not_covered_by("paddle.fluid.Executor", ("run", "close"))

    @staticmethod
    def _wanted(program: Program, item: Variable | str) -> str:
        if isinstance(item, Variable) and item.application is not program.application:
            raise UsageError(f"{item.name!r} in fetch_list belongs to another model than the program that is run")
        name = item.name if isinstance(item, Variable) else item
        variable = program.variable(name)
        is_loss = variable.name == program.application.loss.name
        is_output = variable in program.outputs
        if is_output and not is_loss and training.divided(program.application):
            raise UsageError(f"a pipeline hands back its loss alone, and not {name!r}: leave that out of fetch_list")
        return name

    @staticmethod
    def _fetched(application: Application, name: str, values: dict[str, Tensor]) -> Tensor:
        if name in values:
            return values[name]
        assert isinstance(application.main_prog.variable(name), Parameter)
        return Held(application, name).value()
