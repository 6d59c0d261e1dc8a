"""The training state of an application: its Paddle optimizer, its strategy, and what fleet.distribute made of them.

minimize(loss)               `minimize`: record optimizer and strategy
run of the startup program   `start`
after both                   fleet.distribute; under `auto`, at the first batch, which it uses for measuring
run of the main program      `step`
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
from fleetx.base.trees import arguments
from fleetx.comm.notices import say_once
from fleetx.comm.roles import from_environment
from fleetx.comm.session import current
from fleetx.engine.scheduled import ScheduledEngine
from fleetx.errors import StrategyError, UsageError
from fleetx.fleet.auto import checked
from fleetx.optim import parameter_names
from fleetx.paddle.static import programs, rates
from fleetx.paddle.static.regularization import ClipByGlobalNorm
from fleetx.paddle.static.strategy import PaddleStrategy, of_paddle, relax
from fleetx.parts.auto import PLAN
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.stage import Stage

if TYPE_CHECKING:
    from fleetx.paddle.static.optimizers import PaddleOptimizer

Parameters = Iterable[Parameter | nn.Parameter | str] | None

_KEY = "_fleetx_static"  # attribute of an application; copies of the application start without it


class Training:
    """The state of one application."""

    def __init__(self) -> None:
        self.recipe: PaddleOptimizer | None = None  # set by minimize
        self.strategy = PaddleStrategy()
        self.started = False
        self.seed = 0  # what the startup program drew the weights with; 0 if it left them alone
        self.optimizer: torch.optim.Optimizer | None = None  # set by fleet.distribute

    def __deepcopy__(self, memo: Any) -> Training:
        return Training()

    def __reduce__(self) -> Any:
        return Training, ()


def of(application: Application) -> Training:
    state: Training = application.__dict__.setdefault(_KEY, Training())
    return state


def is_minimized(model: Any) -> TypeGuard[Application]:
    """Whether `minimize` was called for this model."""
    return isinstance(model, Application) and of(model).recipe is not None


# --- minimize -------------------------------------------------------------------------------------
def prepare_strategy(strategy: DistributedStrategy | None, clip: ClipByGlobalNorm | None) -> PaddleStrategy:
    """Return a checked copy of the strategy, by default that of fleet.init, with the optimizer's clipping."""
    declared = checked(strategy) if strategy is not None else current().strategy or PaddleStrategy()
    result = of_paddle(copy.deepcopy(declared))
    if clip is not None:
        settings = result.clip_configs
        if "clip_norm" in settings.given and settings["clip_norm"] != clip.clip_norm:
            raise StrategyError(
                f"clip_configs['clip_norm'] is {settings['clip_norm']}, but grad_clip of the optimizer is "
                f"{clip.clip_norm}: remove one of them"
            )
        settings["clip_norm"], result.clip = clip.clip_norm, True
    result.plan()
    return result


def init_single_worker() -> None:
    """Initialize fleet for an optimizer that was not passed to fleet.distributed_optimizer."""
    if (size := from_environment().size) > 1:
        raise UsageError(
            f"{size} workers would train {size} separate models: pass the optimizer to "
            "fleet.distributed_optimizer(optimizer, strategy) before minimize"
        )
    fleet.init(is_collective=True)


def minimize(
    loss: Variable, recipe: PaddleOptimizer, strategy: PaddleStrategy, only: Parameters, frozen: Parameters
) -> None:
    """Record how to train the program of this loss: the parameters in `only`, except those in `frozen`."""
    if not isinstance(loss, Variable):
        raise UsageError(f"minimize takes the loss of an application, such as model.loss, not {loss!r}")
    application = loss.application
    if loss.name != application.loss.name:
        raise UsageError(f"minimize takes model.loss; {loss.name!r} has no gradient")
    state = of(application)
    if state.recipe is not None:
        raise UsageError("minimize was already called for this model: create a new model to train it differently")
    kept = {id(p) for p in _parameters(application, application.parameters() if only is None else only)}
    trained = kept - {id(p) for p in _parameters(application, frozen)}
    for p in application.parameters():
        p.requires_grad_(p.requires_grad and id(p) in trained)
    state.recipe, state.strategy, recipe.application = recipe, strategy, application
    programs.register(application, minimized=True)
    relax(strategy, recipe, application, current().here())
    for name, reason in strategy.without_meaning():
        say_once(f"{name} has no effect: {reason}")
    _distribute(application)


def as_list(parameters: Any) -> list[Any] | None:
    """Raise an error for a single name, which would be iterated by letters, or a tensor, by rows."""
    if isinstance(parameters, str | Variable | Tensor):
        kind = type(parameters).__name__
        raise UsageError(f"parameters must be a list, not a single {kind}: write [...] around it")
    return None if parameters is None else list(parameters)


def _parameters(application: Application, which: Parameters) -> list[nn.Parameter]:
    own = {id(p) for p in application.parameters()}
    result = []
    for one in as_list(which) or ():
        if isinstance(one, str | Variable):
            if isinstance(one, Variable) and one.application is not application:
                raise UsageError(f"the parameter {one.name!r} belongs to a different model than the loss")
            try:
                one = application.get_parameter(one if isinstance(one, str) else one.name)
            except AttributeError as error:
                raise UsageError(str(error)) from None
        if id(one) not in own:
            raise UsageError(
                f"parameters: an item of type {type(one).__name__} is not a parameter of this model: use "
                "model.parameters(), model.parameter_list(), or names"
            )
        result.append(one)
    return result


# --- the startup program --------------------------------------------------------------------------
def start(application: Application) -> None:
    """Allow the application to run. Its parameters were drawn when it was created; only a random_seed redraws them."""
    state = of(application)
    if done := run_count(application):
        raise UsageError(f"this model has trained for {done} steps, which its startup program would undo")
    if (seed := application.startup_prog.random_seed) != state.seed:
        if state.started:
            raise UsageError(f"random_seed = {seed} is set too late: set it before you run the startup program")
        application.redraw(seed)
        state.seed = seed
    state.started = True
    programs.register(application, minimized=False)
    if current().world is not None:
        application.to(fleet.device())
    _distribute(application)


def _distribute(application: Application, sample: dict[str, Tensor] | None = None) -> None:
    state = of(application)
    recipe, strategy = state.recipe, state.strategy
    measures = strategy.auto or PLAN in os.environ
    if state.optimizer is not None or recipe is None or not state.started or (measures and sample is None):
        return
    if strategy.auto and "pipeline" not in strategy.declared():
        # The script already gives each worker its own batches, but stages of a pipeline would need the same ones.
        strategy.pipeline = False
    application.to(fleet.device())
    params = [p for p in application.parameters() if p.requires_grad]
    if not params:
        raise UsageError("no parameter is left to train: parameter_list and no_grad_set exclude all of them")
    _, state.optimizer = fleet.distribute(application, recipe.build(application, params), strategy, sample=sample)


# --- the main program -----------------------------------------------------------------------------
def check_can_run(program: Program) -> None:
    state = of(program.application)
    if program.kind == "main" and state.recipe is None:
        raise UsageError(
            "this program has no optimizer: call minimize(model.loss) first, or run program.clone(for_test=True) to "
            "evaluate it"
        )
    if not state.started:
        raise UsageError("run the startup program first: exe.run(fluid.default_startup_program())")


def run_count(application: Application) -> int:
    """The number of runs of the main program, including those before a checkpoint: a learning rate depends on it."""
    state = of(application)
    if state.optimizer is None or state.recipe is None:
        return 0
    engine = current().find(application)
    if "runs" in engine.extra:
        return engine.extra["runs"]
    if engine.round and engine.plan.at(Stage.GATE) and rates.changes_by_run(state.recipe.rate):
        raise UsageError(
            "this checkpoint was not saved by a static script and does not hold the number of runs, on which the "
            "learning rate depends: load it without gradient_merge"
        )
    return engine.round


def step(application: Application, feed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Train one step and return the outputs of the application by name."""
    state = of(application)
    if state.optimizer is None:
        _distribute(application, sample=feed)
    assert state.recipe is not None
    assert state.optimizer is not None
    if not application.training:
        application.train()
    done = run_count(application)
    rate = rates.at(state.recipe.rate, done)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    outputs: dict[str, Tensor] = {}

    def keep(out: Any) -> Tensor:
        outputs.update({name: getattr(out, name).detach() for name in application.outputs})
        loss: Tensor = getattr(out, application.outputs[0])
        return loss

    if is_pipelined(application):
        outputs[application.outputs[0]] = fleet.forward_backward(feed, model=application)
    else:
        fleet.forward_backward(feed, loss_fn=keep, model=application)
    state.optimizer.step()
    state.optimizer.zero_grad()
    current().find(application).extra["runs"] = done + 1  # the rate changes with each run, merged or not
    return outputs


SCALARS = ("learning_rate_0", "scheduled_learning_rate", "loss_scaling_0")  # Paddle's names


def scalar(application: Application, name: str) -> Tensor:
    """A value from the last run: the learning rate, or the loss scale of amp."""
    engine = current().find(application)
    if name != "loss_scaling_0":
        return torch.tensor(float(engine.optimizer.param_groups[0]["lr"]))
    for part in engine.plan.parts:
        if "scale" in (state := engine.context_of(part).state or {}):
            return torch.tensor(float(state["scale"]))
    raise UsageError("there is no 'loss_scaling_0': only strategy.amp in float16 scales the loss")


def evaluate(application: Application, feed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a forward pass and return the application's outputs by name; for a pipeline, only the loss."""
    out = forward(application, feed, pipelined=is_pipelined(application))
    if isinstance(out, Tensor):
        return {application.outputs[0]: out}
    return {name: getattr(out, name) for name in application.outputs}


def forward(model: nn.Module, inputs: Any, *, pipelined: bool) -> Any:
    """Run a forward pass without dropout and without gradients. A pipeline returns only its loss."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            if pipelined:
                return fleet.forward_backward(inputs, model=model)
            args, kwargs = arguments(inputs)
            return model(*args, **kwargs)
    finally:
        model.train(training)


def is_pipelined(application: Application) -> bool:
    """Whether the application is split into pipeline stages, which return only the loss."""
    if of(application).optimizer is None:
        return False
    return isinstance(current().find(application), ScheduledEngine)


def parameter(application: Application, name: str) -> tuple[nn.Parameter, bool]:
    """Find a parameter by Paddle's or torch's name, and whether `name` means its transpose.

    Under its Paddle name the weight of a Linear is (in, out).
    """
    names = parameter_names.names(application)
    torch_name = next((own for own, all_names in names.items() if name in all_names), name)
    owner, _, field = torch_name.rpartition(".")
    linear = isinstance(application.get_submodule(owner), nn.Linear) and field == "weight"
    return application.get_parameter(torch_name), linear and name != torch_name
