"""What a static script sees of an application: its programs and its variables, which hold no values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from fleetx.applications.not_covered import not_covered_by, set_once
from fleetx.base.suggest import did_you_mean
from fleetx.errors import UsageError
from fleetx.optim import parameter_names

if TYPE_CHECKING:
    from fleetx.applications.application import Application

_VARIABLE = "paddle.static.Variable", ("name", "shape", "dtype")
_PROGRAM = "paddle.static.Program", ("clone", "inputs", "outputs", "parameters", "random_seed", "variable")


@dataclass(unsafe_hash=True)
class Variable:
    """An input or an output of an application."""

    name: str
    shape: tuple[int, ...]
    """-1 is a size that depends on the batch."""
    dtype: torch.dtype
    application: Application = field(repr=False)
    """The module that `minimize(model.loss)` trains."""

    __getattr__ = not_covered_by(*_VARIABLE)
    __setattr__ = set_once(*_VARIABLE)


class TargetName(str):
    """The name of a metric, which has a `name` like a variable."""

    @property
    def name(self) -> str:
        return str(self)


class Targets(dict[str, Variable]):
    """Metrics by name. They were a list in FleetX until September 2020; `[t.name for t in model.target]` works."""

    def __init__(self, variables: Iterable[Variable]):
        super().__init__({TargetName(variable.name): variable for variable in variables})

    def __radd__(self, others: list[Variable]) -> list[Variable]:
        return [*others, *self.values()]


@dataclass(unsafe_hash=True)
class Parameter(Variable):
    """`name` is Paddle's; the shape is torch's: the weight of a Linear is (out, in)."""

    torch_name: str
    trainable: bool


def check_seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"random_seed = {value!r}: must be an integer of at least 0")
    return value


_set_once = set_once(*_PROGRAM)


@dataclass(unsafe_hash=True)
class Program:
    """An application as a program.

    A module has its weights from the start: running its startup program redraws them only if it has a random_seed.
    """

    application: Application = field(repr=False)
    kind: Literal["main", "startup", "test"] = "main"

    __getattr__ = not_covered_by(*_PROGRAM)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "random_seed":
            return _set_once(self, name, value)
        seed = check_seed(value)
        self.application.seeds[self.kind] = seed
        if seed and self.kind != "startup":
            torch.manual_seed(seed)
        return None

    @property
    def random_seed(self) -> int:
        """Seeds dropout, or, for a startup program, the weights when it is run. 0 seeds nothing."""
        return self.application.seeds.get(self.kind, 0)

    def clone(self, for_test: bool = False) -> Program:
        """Return the same application in eval mode, without updates. for_test must be True."""
        if self.kind == "startup" or not for_test:
            raise UsageError(
                "only clone(for_test=True) of a main program is supported: run the program itself to train"
            )
        return Program(self.application, "test")

    @property
    def inputs(self) -> list[Variable]:
        return self.application.inputs

    @property
    def outputs(self) -> list[Variable]:
        return [self.application.loss, *self.application.target.values()]

    @property
    def parameters(self) -> list[Parameter]:
        return self.application.parameter_list()

    def variable(self, name: str) -> Variable:
        """An input, an output or a parameter, by name; parameters by torch's or Paddle's names."""
        return self.variables([name])[0]

    def variables(self, names: Iterable[str]) -> list[Variable]:
        known: dict[str, Variable] = {v.name: v for v in (*self.inputs, *self.outputs)}
        aliases = parameter_names.names(self.application)
        for parameter in self.parameters:
            known |= dict.fromkeys(aliases[parameter.torch_name], parameter)
        names = list(names)
        for name in names:
            if name not in known:
                hint = did_you_mean(name, known, otherwise=f"its variables are {', '.join([*known][:6])} ...")
                raise UsageError(f"{type(self.application).__name__} has no variable {name!r}: {hint}")
        return [known[name] for name in names]
