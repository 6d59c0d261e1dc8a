"""The base class of applications: modules that take a named batch and return its loss and metrics."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fleetx.applications.program import Parameter, Program, Targets, Variable
from fleetx.base.files import atomic
from fleetx.base.module_names import plain_name
from fleetx.base.suggest import did_you_mean
from fleetx.comm.session import current
from fleetx.data.checks import check_names
from fleetx.errors import UsageError
from fleetx.optim import parameter_names

FILE = "params.pt"  # in the folder passed to save_params


class Feed(NamedTuple):
    """An input. A size of -1 depends on the batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64
    by_sample: bool = True  # does it have one row per sample?


class _RemembersLast(type):
    """Notes in the session which application was created last, and keeps the constructor's arguments."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        application = super().__call__(*args, **kwargs)
        application._arguments = (args, kwargs)
        current().application = weakref.ref(application)
        return application


class Application(nn.Module, metaclass=_RemembersLast):
    """`model(**batch)` returns a named tuple: `loss` first, then metrics. The batch's keys are the names of `inputs`.

    The descriptions (`loss`, `inputs`, `target`, `main_prog` ...) are created on access, so that those of a copied
    module describe the copy.
    """

    outputs: ClassVar[tuple[str, ...]]
    """The fields of the tuple that forward returns."""
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]
    seeds: dict[str, int]
    """The `random_seed` of each of its programs, by kind."""

    def __init__(self, unknown: Mapping[str, Any]):
        """unknown: the constructor's leftover keyword arguments."""
        super().__init__()
        self.seeds = {}
        parameters = inspect.signature(type(self).__init__).parameters.values()
        known = [p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]
        check_names(type(self).__name__, unknown, known)

    def feeds(self) -> dict[str, Feed]:
        """The inputs, by name."""
        raise NotImplementedError

    @property
    def checkpoints(self) -> list[str]:
        """Names of the model's blocks, for `recompute_configs['checkpoints']`."""
        raise NotImplementedError

    # --- description --------------------------------------------------------------------------------
    @property
    def inputs(self) -> list[Variable]:
        return [Variable(name, feed.shape, feed.dtype, self) for name, feed in self.feeds().items()]

    @property
    def loss(self) -> Variable:
        return Variable(self.outputs[0], (), torch.float32, self)

    @property
    def target(self) -> Targets:
        """The metrics that forward returns after the loss, without gradients."""
        return Targets(Variable(name, (), torch.float32, self) for name in self.outputs[1:])

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
        """Map the torch name of each parameter to its Paddle names."""
        return parameter_names.numbered(self.named_modules())

    def parameter_list(self) -> list[Parameter]:
        names = parameter_names.names(self)
        return [  # the last name, because Paddle's programs use `fc_0`, not `linear_0`
            Parameter(names[name][-1], tuple(p.shape), p.dtype, self, torch_name=name, trainable=p.requires_grad)
            for name, p in self._plain_parameters()
        ]

    def _plain_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return ((plain_name(name), p) for name, p in self.named_parameters())

    def get_parameter(self, target: str) -> nn.Parameter:
        """Like `nn.Module.get_parameter`, but also accepts Paddle's names."""
        names = {alias: name for name, aliases in parameter_names.names(self).items() for alias in aliases}
        try:
            return dict(self._plain_parameters())[names[target]] if target in names else super().get_parameter(target)
        except AttributeError:
            hint = did_you_mean(target, names)
            raise AttributeError(f"{type(self).__name__} has no parameter {target!r}{hint and ': ' + hint}") from None

    def redraw(self, seed: int) -> None:
        """Set the weights to those of an application created right after `torch.manual_seed(seed)`."""
        self._check_complete("load")
        args, kwargs = self._arguments
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            twin = type.__call__(type(self), *args, **kwargs)  # without noting it in the session
        self.load_state_dict(twin.state_dict())

    def save_params(self, path: str | Path) -> None:
        """Write parameters and buffers to a folder, replacing an earlier file. Several ranks may do so at once."""
        self._check_complete("save")
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(folder / FILE) as temporary:
            torch.save(self.state_dict(), temporary)

    def load_params(self, path: str | Path) -> None:
        """Read the folder that `save_params` wrote for an application with the same options."""
        self._check_complete("load")
        file = Path(path) / FILE
        if not file.is_file():
            raise UsageError(f"{file} does not exist: pass the folder that was passed to save_params")
        saved: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
        expected, model = self.state_dict(), f"{type(self).__name__} with these options"
        if missing := [name for name in expected if name not in saved]:
            raise UsageError(
                f"{file} has no {missing[0]!r}: it was written by another application, or with different options"
            )
        if unexpected := [name for name in saved if name not in expected]:
            raise UsageError(f"{file} has {unexpected[0]!r}, which {model} does not have")
        for name, tensor in expected.items():
            if tensor.shape != saved[name].shape:
                raise UsageError(
                    f"{file}: {name!r} has shape {tuple(saved[name].shape)}, but {model} needs {tuple(tensor.shape)}"
                )
        self.load_state_dict(saved)

    def _check_complete(self, verb: str) -> None:
        from torch.distributed.tensor import DTensor

        if any(p.is_meta or isinstance(p, DTensor) for p in self.parameters()):
            raise UsageError(f"this rank holds only part of the model: call fleet.{verb}(folder) on every rank instead")


def check_heads(hidden: int, heads: int) -> None:
    if hidden % heads:
        raise UsageError(f"hidden = {hidden}: must be a multiple of heads = {heads}")


def model_options(options: Mapping[str, Any], **required: Any) -> dict[str, Any]:
    """Add the loader options that the model determines; raise an error if `options` contradicts them."""
    for name, value in required.items():
        if options.get(name, value) != value:
            raise UsageError(
                f"{name} = {options[name]!r}: this model was created with {name} = {value!r}, so leave it out"
            )
    return {**options, **required}


def whole_by_default(options: Mapping[str, Any]) -> Any:
    """Loader options for validation: every rank reads all data, as in FleetX, whose scripts evaluate on one worker."""
    return options if "shard" in options or "replica" in options else {**options, "shard": False}
