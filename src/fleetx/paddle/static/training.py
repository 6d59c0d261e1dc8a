"""What has become of an application: how its optimizer was described, and what fleet.distribute made of it.

minimize(loss)             describe: optimizer and strategy are written down
run of the startup         start
both                       fleet.distribute; under `auto` at the first batch, which it measures with
run of the main program    step
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.applications import Application, Parameter, Program, Variable
from fleetx.comm.roles import from_environment
from fleetx.comm.session import current
from fleetx.engine.scheduled import ScheduledEngine
from fleetx.errors import StrategyError, UsageError
from fleetx.optim import parameter_names
from fleetx.paddle.static import devices, programs, rates
from fleetx.paddle.static.regularization import Clip
from fleetx.parts.auto import PLAN
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.stage import Stage

if TYPE_CHECKING:
    from fleetx.paddle.static.optimizers import Described

Parameters = Iterable[Parameter | nn.Parameter | str] | None

_KEY = "_fleetx_static"  # on an application; a copy of it has a fresh one


class Training:
    """Of one application."""

    def __init__(self) -> None:
        self.described: Described | None = None
        self.strategy = DistributedStrategy()
        self.started = False
        self.optimizer: torch.optim.Optimizer | None = None  # there once it is distributed

    def __deepcopy__(self, memo: Any) -> Training:
        return Training()

    def __reduce__(self) -> Any:
        return Training, ()


def of(application: Application) -> Training:
    found: Training = application.__dict__.setdefault(_KEY, Training())
    return found


def is_described(model: Any) -> TypeGuard[Application]:
    """Was it given to `minimize`?"""
    return isinstance(model, Application) and of(model).described is not None


# --- minimize -------------------------------------------------------------------------------------
def declared(strategy: DistributedStrategy | None, clip: Clip | None) -> DistributedStrategy:
    """A copy of the strategy, or of that of fleet.init, with the clipping that the optimizer asks for; checked."""
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise TypeError(f"strategy must be a fleet.DistributedStrategy, not {type(strategy).__name__}")
    made = copy.deepcopy(strategy or current().strategy or DistributedStrategy())
    if clip is not None:
        _clip(made, clip)
    made.plan()
    return made


def _clip(strategy: DistributedStrategy, clip: Clip) -> None:
    settings = strategy.clip_configs
    if "clip_norm" in settings.given and settings["clip_norm"] != clip.clip_norm:
        raise StrategyError(
            f"the strategy clips to {settings['clip_norm']} and grad_clip of the optimizer to {clip.clip_norm}: "
            "keep one of them"
        )
    settings["clip_norm"], strategy.clip = clip.clip_norm, True


def alone() -> None:
    """Be a world of one, for an optimizer that was not given to fleet."""
    if (size := from_environment().size) > 1:
        raise UsageError(
            f"{size} workers would train {size} models, each alone: give the optimizer to "
            "fleet.distributed_optimizer(optimizer, strategy) before minimize"
        )
    fleet.init(is_collective=True)


def describe(
    loss: Variable,
    described: Described,
    strategy: DistributedStrategy,
    only: Parameters,
    frozen: Parameters,
) -> None:
    """Write down how the program of this loss is trained: only these parameters, without those that are frozen."""
    if not isinstance(loss, Variable):
        raise UsageError(f"minimize takes the loss of an application, such as model.loss, not {loss!r}")
    application = loss.application
    if loss.name != application.loss.name:
        raise UsageError(f"minimize takes model.loss; {loss.name!r} has no gradient")
    found = of(application)
    if found.described is not None:
        raise UsageError("minimize was called before for this model: make a new model to train it otherwise")
    kept = {id(p) for p in _parameters(application, application.parameters() if only is None else only)}
    trained = kept - {id(p) for p in _parameters(application, frozen)}
    for p in application.parameters():
        p.requires_grad_(p.requires_grad and id(p) in trained)
    found.described, found.strategy, described.application = described, strategy, application
    programs.note(application, described=True)
    for name, reason in strategy.without_meaning():
        devices.say_once(f"no meaning here: {name} ({reason})")
    _distribute(application)


def several(which: Any) -> list[Any] | None:
    """A name alone would be taken letter by letter, and a tensor row by row."""
    if isinstance(which, str | Variable | Tensor):
        raise UsageError(f"parameters are given as a list, not as one {type(which).__name__}: write [...] around it")
    return None if which is None else list(which)


def _parameters(application: Application, which: Parameters) -> list[nn.Parameter]:
    own = {id(p) for p in application.parameters()}
    found = []
    for one in several(which) or ():
        if isinstance(one, str | Variable):
            if isinstance(one, Variable) and one.application is not application:
                raise UsageError(f"the parameter {one.name!r} belongs to another model than the loss")
            try:
                one = application.get_parameter(one if isinstance(one, str) else one.name)
            except AttributeError as error:
                raise UsageError(str(error)) from None
        if id(one) not in own:
            raise UsageError(
                f"a {type(one).__name__} among the parameters is none of this model's: give model.parameters(), "
                "model.parameter_list(), or names"
            )
        found.append(one)
    return found


# --- the startup program --------------------------------------------------------------------------
def start(application: Application) -> None:
    """The parameters are there since the application was made; from now on it may be run."""
    found = of(application)
    if done := runs(application):
        raise UsageError(f"the model has trained for {done} steps, which its startup program would undo")
    found.started = True
    programs.note(application, described=False)
    if current().world is not None:
        application.to(fleet.device())
    _distribute(application)


def start_once(application: Application) -> None:
    """Where nobody has, as the trainer does by itself."""
    if not of(application).started:
        start(application)


def _distribute(application: Application, sample: dict[str, Tensor] | None = None) -> None:
    found = of(application)
    described, strategy = found.described, found.strategy
    measures = strategy.auto or PLAN in os.environ
    if found.optimizer is not None or described is None or not found.started or (measures and sample is None):
        return
    if strategy.auto and "pipeline" not in strategy.declared():
        # The script has dealt its batches to the workers by now, and stages of a pipeline would need the same ones.
        strategy.pipeline = False
    application.to(fleet.device())
    params = [p for p in application.parameters() if p.requires_grad]
    if not params:
        raise UsageError("no parameter is left to train: parameter_list and no_grad_set leave none")
    _, found.optimizer = fleet.distribute(application, described.make(application, params), strategy, sample=sample)


# --- the main program -----------------------------------------------------------------------------
def check_can_run(program: Program) -> None:
    """Before anything else is looked at."""
    found = of(program.application)
    if program.kind == "main" and found.described is None:
        raise UsageError(
            "this program has no optimizer: call minimize(model.loss) first, or run program.clone(for_test=True) to "
            "look at its outputs"
        )
    if not found.started:
        raise UsageError("run the startup program first: exe.run(fluid.default_startup_program())")


def runs(application: Application) -> int:
    """How often the main program was run, before this process too: by that a learning rate moves."""
    found = of(application)
    if found.optimizer is None or found.described is None:
        return 0
    engine = current().find(application)
    if "runs" in engine.extra:
        return engine.extra["runs"]
    if engine.round and engine.plan.at(Stage.GATE) and rates.moves_by_run(found.described.rate):
        raise UsageError(
            "this checkpoint was not saved by a static script, and does not tell how many runs its rounds were made "
            "of, by which a learning rate moves: load it without gradient_merge"
        )
    return engine.round


def step(application: Application, feed: dict[str, Tensor]) -> dict[str, Tensor]:
    """One step of training; what the application returned, by name."""
    found = of(application)
    if found.optimizer is None:
        _distribute(application, sample=feed)
    assert found.described is not None
    assert found.optimizer is not None
    if not application.training:
        application.train()
    done = runs(application)
    rate = rates.at(found.described.rate, done)
    for group in found.optimizer.param_groups:
        group["lr"] = rate
    outputs: dict[str, Tensor] = {}

    def keep(out: Any) -> Tensor:
        outputs.update({name: getattr(out, name).detach() for name in application.outputs})
        loss: Tensor = getattr(out, application.outputs[0])
        return loss

    if divided(application):
        outputs[application.outputs[0]] = fleet.forward_backward(feed, model=application)
    else:
        fleet.forward_backward(feed, loss_fn=keep, model=application)
    found.optimizer.step()
    found.optimizer.zero_grad()
    current().find(application).extra["runs"] = done + 1  # the rate moves with each run, merged or not
    return outputs


def evaluate(application: Application, feed: dict[str, Tensor]) -> dict[str, Tensor]:
    """A forward without dropout and without gradients."""
    training = application.training
    application.eval()
    try:
        with torch.no_grad():
            if divided(application):
                return {application.outputs[0]: fleet.forward_backward(feed, model=application)}
            out = application(**feed)
            return {name: getattr(out, name) for name in application.outputs}
    finally:
        application.train(training)


def divided(application: Application) -> bool:
    """Do the stages of a pipeline hold it? They hand back the loss alone."""
    if of(application).optimizer is None:
        return False
    return isinstance(current().find(application), ScheduledEngine)


def parameter(application: Application, name: str) -> tuple[nn.Parameter, bool]:
    """By either of its names; and whether Paddle's shape of it is the other way round: a Linear's is (in, out)."""
    names = parameter_names.names(application)
    torch_name = next((own for own, all_names in names.items() if name in all_names), name)
    owner, _, field = torch_name.rpartition(".")
    linear = isinstance(application.get_submodule(owner), nn.Linear) and field == "weight"
    return application.get_parameter(torch_name), linear and name != torch_name
