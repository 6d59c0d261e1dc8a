"""`Executor.run`: run a program once and fetch values by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetx import fleet
from fleetx.applications import Parameter, Program, Variable
from fleetx.applications.not_covered import not_covered_by
from fleetx.comm.notices import say_once
from fleetx.comm.session import current
from fleetx.errors import UsageError
from fleetx.paddle.static import devices, feeds, training
from fleetx.paddle.static.programs import PendingProgram, bound, default_main_program
from fleetx.paddle.static.values import Scope, as_numpy, full_value

Fetched = Variable | str


class Executor:
    def __init__(self, place: devices.Place | None = None):
        if not isinstance(place, devices.CPUPlace | devices.CUDAPlace | None):
            raise UsageError(f"Executor takes a place, such as fluid.CUDAPlace(0), not {place!r}")
        self.place = place

    def run(
        self,
        program: Program | PendingProgram | None = None,
        feed: Any = None,
        fetch_list: Sequence[Fetched] | Fetched | None = None,
        *,
        scope: Scope | None = None,
        return_numpy: bool = True,
        use_program_cache: bool = False,
    ) -> list[Any]:
        """Run one training step of a main program, or one forward pass of a test clone.

        fetch_list names outputs, inputs and parameters; parameters have their values after the step. The only scope is
        fluid.global_scope(). Without return_numpy the values are tensors.
        """
        if use_program_cache:
            say_once("use_program_cache has no effect: there is no program to prepare")
        program = bound(default_main_program() if program is None else program)
        if not isinstance(program, Program):
            raise UsageError(f"Executor.run takes a program, such as model.main_prog, not {program!r}")
        if not isinstance(scope, Scope | None):
            raise UsageError(f"Executor.run takes fluid.global_scope(), or no scope, not {scope!r}")
        application = program.application
        if self.place is not None and current().world is not None:
            self.place.check(fleet.device())
        if program.kind == "startup":
            if feed or fetch_list:
                raise UsageError("the startup program has no inputs and no outputs: remove feed and fetch_list")
            training.start(application)
            return []
        training.check_can_run(program)
        names = _names(program, fetch_list)
        variables = _variables(program, [name for name in names if name not in training.SCALARS])
        run = training.step if program.kind == "main" else training.evaluate
        inputs = feeds.tensors(application, feed)
        values = inputs | run(application, inputs)
        parameters = {name for name, variable in variables.items() if isinstance(variable, Parameter)}
        results = [
            training.scalar(application, name) if name in training.SCALARS
            else full_value(application, name) if name in parameters
            else values[name]
            for name in names
        ]  # fmt: skip
        return [as_numpy(value) for value in results] if return_numpy else results

    def close(self) -> None:
        """A no-op."""

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
            raise UsageError(f"{item.name!r} in fetch_list belongs to a different model than the program")
    return [item.name if isinstance(item, Variable) else item for item in items]


def _variables(program: Program, names: list[str]) -> dict[str, Variable]:
    """Look up the names, so that unknown ones raise an error before anything is trained."""
    variables = dict(zip(names, program.variables(names), strict=True)) if names else {}
    if training.is_pipelined(program.application):
        outputs = {variable.name for variable in program.outputs} - {program.application.loss.name}
        if others := [name for name in names if name in outputs]:
            raise UsageError(f"a pipeline returns only its loss: remove {others[0]!r} from fetch_list")
    return variables
