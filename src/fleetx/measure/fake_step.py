"""The peak of a training step, predicted: the step is run on tensors without data, and its bytes are counted.

Everything that makes tensors runs as it would: the model, autograd, recomputation, the optimizer. Nothing is computed,
so a step of a large model takes about a second, and needs no memory.
"""

from __future__ import annotations

import copy
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim import SGD, Optimizer
from torch.utils import _pytree as pytree

from fleetx.base.trees import loss_of, map_tensors, tensors_of
from fleetx.comm.roles import Place
from fleetx.comm.world import World
from fleetx.engine.engine import Engine
from fleetx.measure.op_scratch import Insides
from fleetx.measure.tracker import Tracker, bytes_of
from fleetx.strategy.compose import compose
from fleetx.strategy.part import Part

log = logging.getLogger(__name__)
Forward = Callable[[], AbstractContextManager[Any]]
Arm = Callable[[nn.Module, Forward], Forward]  # puts segments into a model; what it returns goes around each forward


@dataclass(frozen=True)
class Step:
    """What is predicted: one step of a training."""

    model: nn.Module
    optimizer: Optimizer
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any, Any], Tensor] | None = (
        None  # of outputs and targets; None: that of the model, or cross-entropy
    )
    targets: Any = None
    batch: int | None = None  # how many samples, where it is not as many as the inputs have
    samples: int | None = None  # how many they have
    parts: Sequence[Part] = ()  # those that change how a forward runs
    kept_gradients: bool = False  # are gradients there during the forward too, merged or in buckets?
    beside: int = 0  # bytes that strategies keep

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))


@dataclass(frozen=True)
class Estimate:
    """Bytes. `peak` is the most that there is at once; the parts are those that are always there."""

    peak: int
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    strategies: int
    batch: int
    running: int  # the most during forward and backward
    updating: int  # and during the update

    @property
    def at(self) -> str:
        return "update" if self.updating > self.running else "forward and backward"

    @property
    def fixed(self) -> int:
        """What recomputation cannot change. Gradients are in it where they are there during the forward."""
        return self.parameters + self.buffers + self.optimizer + self.strategies + self.batch

    @property
    def activations(self) -> int:
        return self.peak - self.fixed


class Fakes:
    """Copies of a model, its optimizer and its inputs that hold no data."""

    def __init__(self, step: Step):
        self.step = step
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)  # a tensor that a module keeps unregistered
        self._memo: dict[int, Any] = {}
        self.model: nn.Module = self._without_data(step.model)
        self.args, self.kwargs, self.targets = map_tensors(self._input, (step.args, step.kwargs, step.targets))

    def _input(self, tensor: Tensor) -> Tensor:
        shape = tensor.shape
        if self.step.batch is not None and tensor.dim() and len(tensor) == self.step.samples:
            shape = torch.Size([self.step.batch, *tensor.shape[1:]])
        if shape == tensor.shape:
            made: Tensor = self.mode.from_tensor(tensor.detach())
        else:
            with self.mode:
                made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        return made.requires_grad_(tensor.requires_grad)

    def _without_data(self, model: nn.Module) -> nn.Module:
        for p in model.parameters():
            fake: Tensor = nn.Parameter(self.mode.from_tensor(p.detach()), requires_grad=p.requires_grad)
            self._memo[id(p)] = fake
            if p.grad is not None:
                self._memo[id(p.grad)] = None
        for b in model.buffers():
            self._memo[id(b)] = self.mode.from_tensor(b)
        for value in (v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor)):
            self._memo[id(value)] = self.mode.from_tensor(value.detach())  # what a forward left behind
        made: nn.Module = copy.deepcopy(model, self._memo)
        for p in made.parameters():
            p.grad = None
        return without_hooks(made)

    def optimizer(self) -> Optimizer:
        """Of the same kind, with its settings: without the hooks of the user's, and with nothing gathered."""
        given = self.step.optimizer
        made: Optimizer = object.__new__(type(given))
        made.__dict__.update({k: v for k, v in vars(given).items() if "hooks" not in k})
        groups = [group | {"params": [self._memo[id(p)] for p in group["params"] if id(p) in self._memo]}
                  for group in given.param_groups]  # fmt: skip
        made.__setstate__({"defaults": given.defaults, "state": defaultdict(dict), "param_groups": groups})
        return made

    @cached_property
    def engine(self) -> Engine:
        """For the strategies that act on the model alone."""
        world = World(Place(), self.step.device)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        return Engine(compose(self.step.parts), self.model, SGD(parameters, lr=0.0), world)

    def contexts(self) -> AbstractContextManager[Any]:
        """Those of a forward, for a piece of it that runs alone."""
        return self.engine.forward_context(first=True)

    def run(self, forward: Forward) -> None:
        """Forward and backward. What the model returned is there until the end, as it is in most loops."""
        with forward():
            out = self.model(*self.args, **self.kwargs)
        loss(self.step, out, self.targets).backward()


def loss(step: Step, out: Any, targets: Any) -> Tensor:
    if step.loss is not None:
        return step.loss(out, targets)
    if (own := loss_of(out)) is not None:
        return own
    tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([_some_loss(t).sum() for t in tensors]).sum()


def _some_loss(t: Tensor) -> Tensor:
    """Where nobody says what the loss is: one that takes what cross-entropy does."""
    return torch.log_softmax(t.float(), -1) if t.dim() > 1 else t


def estimate(step: Step, arm: Arm | None = None) -> Estimate:
    """What a step takes. Operations that hide memory are run once for real, one at a time."""
    insides = Insides(step.device)
    with random_kept(), torch.enable_grad():
        found = _traced(step, arm, insides)
        if insides.measure():
            found = _traced(step, arm, insides)
    return found


def _traced(step: Step, arm: Arm | None, insides: Insides) -> Estimate:
    fakes = Fakes(step)
    with fakes.mode, Tracker(insides) as tracker:
        parameters, buffers = list(fakes.model.parameters()), list(fakes.model.buffers())
        batch = tensors_of((fakes.args, fakes.kwargs, fakes.targets))
        for t in (*parameters, *buffers, *batch):
            tracker.see(t)
        optimizer = fakes.optimizer()
        state, gradients = _first_update(optimizer, parameters, tracker, keep=step.kept_gradients)
        assert fakes.engine  # its hooks are there
        forward = arm(fakes.model, fakes.engine.forward_context) if arm is not None else nullcontext
        tracker.reset()
        fakes.run(forward)
        running = tracker.peak + step.beside
        tracker.reset()
        _update(optimizer)
        updating = tracker.peak + step.beside
    return Estimate(max(running, updating), bytes_of(parameters), bytes_of(buffers), gradients, state, step.beside,
                    bytes_of(batch), running, updating)  # fmt: skip


def _first_update(
    optimizer: Optimizer, parameters: list[nn.Parameter], tracker: Tracker, *, keep: bool
) -> tuple[int, int]:
    """Makes what the optimizer gathers. Returns its bytes and those of the gradients."""
    before = tracker.live
    for p in parameters:
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    gradients = tracker.live - before
    if _update(optimizer):
        state = tracker.live - before - gradients
    else:
        log.warning("the state of %s is taken for two copies of the parameters", type(optimizer).__name__)
        for p in parameters:
            optimizer.state[p] = {"one": torch.zeros_like(p), "two": torch.zeros_like(p)}
        state = 2 * bytes_of(parameters)
    if not keep:
        optimizer.zero_grad(set_to_none=True)
    return state, gradients


def _update(optimizer: Optimizer) -> bool:
    """False where it cannot be run without data."""
    try:
        with torch.no_grad():
            optimizer.step()
    except Exception as error:
        log.debug("the step of %s is not predicted: %s", type(optimizer).__name__, error)
        return False
    return True


@contextmanager
def random_kept() -> Iterator[None]:
    """Whatever is drawn here, the training goes on as if it had not been."""
    others = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(others[0])
        numpy.random.set_state(others[1])


def without_hooks(model: nn.Module) -> nn.Module:
    """A copy that is run to find something out must not call those of the user."""
    for module in model.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            getattr(module, name).clear()
    return model
