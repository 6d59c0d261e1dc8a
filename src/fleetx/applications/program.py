"""What a static script asks of an application: its variables by name, and a program. Descriptions alone, no values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from fleetx.applications.not_covered import not_covered_by, set_once
from fleetx.errors import UsageError
from fleetx.optim import parameter_names

if TYPE_CHECKING:
    from fleetx.applications.application import Application

_VARIABLE = "paddle.static.Variable", ("name", "shape", "dtype")
_PROGRAM = "paddle.static.Program", ("clone", "inputs", "outputs", "parameters", "variable")


@dataclass(unsafe_hash=True)
class Variable:
    """An input or an output of an application."""

    name: str
    shape: tuple[int, ...]
    """-1: as the batch has it."""
    dtype: torch.dtype
    application: Application = field(repr=False)
    """To whom it belongs: `minimize(model.loss)` is about this module."""

    __getattr__ = not_covered_by(*_VARIABLE)
    __setattr__ = set_once(*_VARIABLE)


@dataclass(unsafe_hash=True)
class Parameter(Variable):
    """`name` is Paddle's; the shape is torch's, so the weight of a Linear is (out, in)."""

    torch_name: str
    trainable: bool


@dataclass(unsafe_hash=True)
class Program:
    """An application as a program. Its startup has nothing left to do: the module has its weights since it was made."""

    application: Application = field(repr=False)
    kind: Literal["main", "startup", "test"] = "main"

    __getattr__ = not_covered_by(*_PROGRAM)
    __setattr__ = set_once(*_PROGRAM)

    def clone(self, for_test: bool = False) -> Program:
        """With for_test=True, the same application, run without training it: no dropout, no update."""
        if self.kind == "startup" or not for_test:
            raise UsageError("clone(for_test=True) of a main program is all there is: run the program itself to train")
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
        """An input, an output or a parameter, by its name; parameters by torch's names too."""
        return self.variables([name])[0]

    def variables(self, names: Iterable[str]) -> list[Variable]:
        known: dict[str, Variable] = {v.name: v for v in (*self.inputs, *self.outputs)}
        aliases = parameter_names.names(self.application)
        for parameter in self.parameters:
            known |= dict.fromkeys(aliases[parameter.torch_name], parameter)
        found = []
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join([*known][:6])} ..."
                raise UsageError(f"{type(self.application).__name__} has no variable {name!r}: {hint}")
            found.append(known[name])
        return found
