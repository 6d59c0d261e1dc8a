"""What every application has: a module that is called with a named batch, and returns its loss and its targets."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import uuid
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fleetx.applications.program import Parameter, Program, Variable
from fleetx.base.module_names import plain_name
from fleetx.data.checks import check_names
from fleetx.errors import UsageError
from fleetx.optim import parameter_names

FILE = "params.pt"  # inside of the folder that save_params is given


class Feed(NamedTuple):
    """What an input is like; -1 is a size that the batch decides."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64
    by_sample: bool = True  # has it a row for each sample?


class _Remembered(type):
    """Remembers the last one that was made: not before its constructor has ended well."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        Application.last = weakref.ref(made)
        return made


class Application(nn.Module, metaclass=_Remembered):
    """`model(**batch)` returns a named tuple: `loss` first, then the targets. The names of the batch are `inputs`'.

    The properties that describe it (`loss`, `inputs`, `target`, `main_prog` ...) are made anew each time, so that a
    copy of the module describes the copy.
    """

    outputs: ClassVar[tuple[str, ...]]
    """The fields of what forward returns."""
    last: ClassVar[weakref.ref[Application] | None] = None
    """The application that was made last: whose programs are the default ones of a static script."""

    def __init__(self, unknown: Mapping[str, Any]):
        """unknown: options that the constructor has no name for."""
        super().__init__()
        parameters = inspect.signature(type(self).__init__).parameters.values()
        known = [p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]
        check_names(type(self).__name__, unknown, known)

    def feeds(self) -> dict[str, Feed]:
        """The inputs, by name."""
        raise NotImplementedError

    @property
    def checkpoints(self) -> list[str]:
        """Names of the modules between which a strategy may recompute: its blocks."""
        raise NotImplementedError

    # --- described --------------------------------------------------------------------------------
    @property
    def inputs(self) -> list[Variable]:
        return [Variable(name, feed.shape, feed.dtype, self) for name, feed in self.feeds().items()]

    @property
    def loss(self) -> Variable:
        return Variable(self.outputs[0], (), torch.float32, self)

    @property
    def target(self) -> dict[str, Variable]:
        """What it returns besides the loss; without gradients."""
        return {name: Variable(name, (), torch.float32, self) for name in self.outputs[1:]}

    @property
    def main_prog(self) -> Program:
        return Program(self, "main")

    @property
    def startup_prog(self) -> Program:
        return Program(self, "startup")

    def get_loss(self) -> Variable:
        return self.loss

    def main_program(self) -> Program:
        return self.main_prog

    def startup_program(self) -> Program:
        return self.startup_prog

    # --- parameters -------------------------------------------------------------------------------
    def paddle_names(self) -> dict[str, list[str]]:
        """Paddle's names of each parameter, by torch's."""
        return parameter_names.numbered(self.named_modules())

    def parameter_list(self) -> list[Parameter]:
        names = parameter_names.names(self)
        return [  # the last name: of `linear_0` and `fc_0`, Paddle's programs say `fc_0`
            Parameter(names[name][-1], tuple(p.shape), p.dtype, self, torch_name=name, trainable=p.requires_grad)
            for name, p in self._plainly_named()
        ]

    def _plainly_named(self) -> Iterable[tuple[str, nn.Parameter]]:
        return ((plain_name(name), p) for name, p in self.named_parameters())

    def get_parameter(self, target: str) -> nn.Parameter:
        """As torch's, by Paddle's name too."""
        names = parameter_names.names(self)
        found = next((name for name, all_names in names.items() if target in all_names), None)
        try:
            return dict(self._plainly_named())[found] if found is not None else super().get_parameter(target)
        except AttributeError:  # which torch promises for a name that is not there
            near = difflib.get_close_matches(target, [n for some in names.values() for n in some], n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"{type(self).__name__} has no parameter {target!r}{hint}") from None

    def save_params(self, path: str | Path) -> None:
        """Write parameters and buffers into a folder. Several ranks may do so at once; what was there is replaced."""
        self._check_whole("save")
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f".{FILE}.{uuid.uuid4().hex}"
        try:
            torch.save(self.state_dict(), beside)
            os.replace(beside, folder / FILE)
        finally:
            beside.unlink(missing_ok=True)

    def load_params(self, path: str | Path) -> None:
        """Read what `save_params` wrote into this folder, for an application of the same options."""
        self._check_whole("load")
        file = Path(path) / FILE
        if not file.is_file():
            raise UsageError(f"there is no {file}: load_params takes the folder that was given to save_params")
        found: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
        wanted = self.state_dict()
        if missing := [name for name in wanted if name not in found]:
            raise UsageError(f"{file} has no {missing[0]!r}: it was written by another application, or other options")
        if strange := [name for name in found if name not in wanted]:
            raise UsageError(f"{file} has {strange[0]!r}, which {type(self).__name__} with these options has not")
        for name, tensor in wanted.items():
            if tensor.shape != found[name].shape:
                raise UsageError(
                    f"{file}: {name!r} has the shape {tuple(found[name].shape)}, and {type(self).__name__} with these "
                    f"options needs {tuple(tensor.shape)}"
                )
        self.load_state_dict(found)

    def _check_whole(self, verb: str) -> None:
        from torch.distributed.tensor import DTensor

        if any(p.is_meta or isinstance(p, DTensor) for p in self.parameters()):
            raise UsageError(
                f"this rank holds a part of the model only: call fleet.{verb}(folder) on every rank instead"
            )


def need_transformers(application: Application) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(
            f"{type(application).__name__} needs the package transformers: pip install fleetx[applications]"
        )


# --- options --------------------------------------------------------------------------------------
def check_heads(hidden: int, heads: int) -> None:
    if hidden % heads:
        raise UsageError(f"hidden = {hidden} cannot be divided among heads = {heads}: choose a multiple")


def check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise UsageError(f"dropout = {dropout!r}: must be at least 0 and less than 1")


def in_form(options: Mapping[str, Any], **form: Any) -> dict[str, Any]:
    """Options of a loader, with those that the model decides: who says them too must say the same."""
    for name, value in form.items():
        if options.get(name, value) != value:
            raise UsageError(f"{name} = {options[name]!r}: this model was made with {name} = {value!r}")
    return {**options, **form}
