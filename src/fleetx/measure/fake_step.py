"""Predicts the peak memory of a training step by running it on fake tensors and counting their bytes.

The model, autograd, recomputation and the optimizer all run as usual, but nothing is computed: a step of a large model
takes about a second and needs no memory.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import platform
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fleetx.base import seams
from fleetx.base.module_names import named_modules
from fleetx.base.seams import FakeTensorMode, NormBase, pytree
from fleetx.base.trees import loss_of, map_tensors, tensors_of
from fleetx.comm.roles import ProcessInfo
from fleetx.comm.world import World
from fleetx.engine.dtensors import local
from fleetx.engine.engine import Engine
from fleetx.measure.op_scratch import OpScratch, with_scratch
from fleetx.measure.tracker import Tracker, bytes_of
from fleetx.strategy.compose import Plan, compose
from fleetx.strategy.part import Part
from fleetx.strategy.stage import Stage

log = logging.getLogger(__name__)
_VERSION = 2  # of what is stored under a `step_key`
AroundForward = Callable[[], AbstractContextManager[Any]]  # to be entered around each forward
InstallSegments = Callable[[nn.Module, AroundForward], AroundForward]  # puts segments into a model


@dataclass(frozen=True)
class TrainingStep:
    """The step to predict."""

    model: nn.Module
    optimizer: Optimizer
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any, Any], Tensor] | None = None  # of outputs and targets
    targets: Any = None
    batch: int | None = None  # predict for this many samples instead of those in the inputs
    samples: int | None = None  # in the inputs
    parts: Sequence[Part] = ()  # those that change how a forward runs
    kept_gradients: bool = False  # gradients exist during the forward too: merged, or in buckets
    extra_bytes: int = 0  # kept by strategies

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def loss(self, out: Any, targets: Any) -> Tensor:
        """The loss by `loss_fn`, or the model's own, or one that takes as much memory as cross-entropy."""
        if self.loss_fn is not None:
            return self.loss_fn(out, targets)
        if (own := loss_of(out)) is not None:
            return own
        outputs = [t for t in tensors_of(out) if t.requires_grad]
        return torch.stack([(torch.log_softmax(t.float(), -1) if t.dim() > 1 else t).sum() for t in outputs]).sum()

    @staticmethod
    def under(
        plan: Plan, model: nn.Module, optimizer: Optimizer, *, ranks: int, merge: bool = False, **inputs: Any
    ) -> TrainingStep:
        """A step with what the plan's parts keep in memory. merge: gradients are merged, whether or not a part does."""
        merge = merge or bool(plan.at(Stage.GATE))
        params = list(model.parameters())
        kept = sum(part.keeps(params, plan) for part in plan.parts)
        return TrainingStep(
            model, optimizer, **inputs, parts=[part for part in plan.parts if part.changes_forward],
            kept_gradients=merge or ranks > 1, extra_bytes=kept + (bucket_bytes(model) if merge and ranks > 1 else 0),
        )  # fmt: skip


def bucket_bytes(model: nn.Module) -> int:
    """Bytes of the buckets in which DDP reduces. If steps are merged, the gradients exist in addition to them."""
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


@dataclass(frozen=True)
class Estimate:
    """Bytes. `peak` is the highest total; all others but `running` and `updating` are held throughout the step."""

    peak: int
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    strategies: int
    batch: int
    running: int  # peak of forward and backward
    updating: int  # peak of the update

    @property
    def fixed(self) -> int:
        """What recomputation cannot reduce."""
        return self.parameters + self.buffers + self.optimizer + self.strategies + self.batch

    @property
    def activations(self) -> int:
        return self.peak - self.fixed


class FakeStep:
    """Fake copies of a model, its optimizer and its inputs."""

    def __init__(self, step: TrainingStep):
        self.step = step
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)  # a module may hold tensors that are not registered
        self._fakes: dict[int, Any] = {}
        self.model: nn.Module = self._without_data(step.model)
        self.args, self.kwargs, self.targets = map_tensors(self._input, (step.args, step.kwargs, step.targets))

    def _input(self, tensor: Tensor) -> Tensor:
        shape = tensor.shape
        if self.step.batch is not None and tensor.dim() and len(tensor) == self.step.samples:
            shape = torch.Size([self.step.batch, *tensor.shape[1:]])
        if shape == tensor.shape:
            fake: Tensor = self.mode.from_tensor(tensor.detach())
        else:
            with self.mode:
                fake = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        return fake.requires_grad_(tensor.requires_grad)

    def _without_data(self, model: nn.Module) -> nn.Module:
        for p in model.parameters():
            self._fakes[id(p)] = nn.Parameter(self._whole(p), requires_grad=p.requires_grad)
            if p.grad is not None:
                self._fakes[id(p.grad)] = None
        for b in model.buffers():
            self._fakes[id(b)] = self.mode.from_tensor(b)
        for value in (v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor)):
            self._fakes[id(value)] = self.mode.from_tensor(value.detach())  # a forward may leave tensors behind
        fake: nn.Module = copy.deepcopy(model, self._fakes)
        for p in fake.parameters():
            p.grad = None
        for norm in (m for m in fake.modules() if isinstance(m, NormBase) and m.momentum is None):
            norm.momentum = 0.1  # a cumulative average divides by a count, which has no data here
        return without_hooks(fake)

    def _whole(self, p: Tensor) -> Tensor:
        """A fake of the whole parameter, even if ranks have divided it."""
        if local(p) is p:
            return self.mode.from_tensor(p.detach())
        with self.mode:
            return torch.empty(p.shape, dtype=p.dtype, device=p.device)

    def optimizer(self) -> Optimizer:
        return copy_optimizer(self.step.optimizer, self._fakes)

    @cached_property
    def engine(self) -> Engine:
        """Runs the strategies that act on the forward."""
        world = World(ProcessInfo(), self.step.device)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        return Engine(compose(self.step.parts), self.model, SGD(parameters, lr=0.0), world)

    def contexts(self) -> AbstractContextManager[Any]:
        """The contexts of a forward, for a block that runs alone."""
        return self.engine.forward_context(first=True)

    def run(self, forward: AroundForward) -> None:
        """Forward and backward. The outputs are kept until the end, as in most training loops."""
        with forward():
            out = self.model(*self.args, **self.kwargs)
        self.step.loss(out, self.targets).backward()


def estimate(step: TrainingStep, install: InstallSegments | None = None, *, plain: Estimate | None = None) -> Estimate:
    """Predict the memory of a step, with the segments that `install` puts into the model.

    plain: what was predicted without segments; they do not change the update, so it is not predicted again.
    """
    with preserve_rng(), torch.enable_grad():
        return with_scratch(step.device, partial(_estimate, step, install, plain))


def _estimate(
    step: TrainingStep, install: InstallSegments | None, plain: Estimate | None, scratch: OpScratch
) -> Estimate:
    fake = FakeStep(step)
    with fake.mode, Tracker(scratch) as tracker:
        parameters, buffers = list(fake.model.parameters()), list(fake.model.buffers())
        batch = tensors_of((fake.args, fake.kwargs, fake.targets))
        for t in (*parameters, *buffers, *batch):
            tracker.see(t)
        if plain is None:
            optimizer = fake.optimizer()
            state, gradients = _first_update(optimizer, parameters, tracker, keep=step.kept_gradients)
        else:
            state, gradients = plain.optimizer, plain.gradients
            tracker.live += state
            if step.kept_gradients:
                _make_gradients(parameters)
        forward_context = fake.engine.forward_context  # creating the engine also installs its hooks
        forward = install(fake.model, forward_context) if install is not None else nullcontext
        tracker.reset()
        fake.run(forward)
        running = tracker.peak + step.extra_bytes
        if plain is None:
            tracker.reset()
            _update(optimizer)
            updating = tracker.peak + step.extra_bytes
        else:
            updating = plain.updating
    return Estimate(max(running, updating), bytes_of(parameters), bytes_of(buffers), gradients, state, step.extra_bytes,
                    bytes_of(batch), running, updating)  # fmt: skip


def update_bytes(optimizer: Optimizer) -> tuple[int, int, int]:
    """For the parameters that this rank holds: bytes of the state and of the gradients, and the peak of an update."""
    mode, fakes = FakeTensorMode(allow_non_fake_inputs=True), dict[int, Any]()
    for p in (p for group in optimizer.param_groups for p in group["params"] if not p.is_meta):
        fakes[id(p)] = nn.Parameter(mode.from_tensor(local(p.detach())), requires_grad=p.requires_grad)
    with mode, Tracker() as tracker:
        for p in fakes.values():
            tracker.see(p)
        made = copy_optimizer(optimizer, fakes)
        state, gradients = _first_update(made, list(fakes.values()), tracker, keep=True)
        tracker.reset()
        _update(made)
    return state, gradients, tracker.peak


def _first_update(
    optimizer: Optimizer, parameters: list[nn.Parameter], tracker: Tracker, *, keep: bool
) -> tuple[int, int]:
    """Create the optimizer's state. Returns the bytes of the state and of the gradients."""
    before = tracker.live
    _make_gradients(parameters)
    gradients = tracker.live - before
    if _update(optimizer):
        state = tracker.live - before - gradients
    else:
        log.warning("the state of %s is assumed to be two copies of the parameters", type(optimizer).__name__)
        for p in parameters:
            optimizer.state[p] = {"one": torch.zeros_like(p), "two": torch.zeros_like(p)}
        state = 2 * bytes_of(parameters)
    if not keep:
        optimizer.zero_grad(set_to_none=True)
    return state, gradients


def _make_gradients(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        if p.requires_grad:
            p.grad = torch.zeros_like(p)


def _update(optimizer: Optimizer) -> bool:
    """Returns False if the optimizer cannot run on fake tensors."""
    try:
        with torch.no_grad():
            optimizer.step()
    except Exception as error:
        log.debug("the step of %s is not predicted: %s", type(optimizer).__name__, error)
        return False
    return True


def copy_optimizer(optimizer: Optimizer, params: Mapping[int, Any]) -> Optimizer:
    """Same class and settings, without state and hooks. params: maps the id of each parameter to its replacement."""
    kind = type(optimizer)
    made: Optimizer = object.__new__(kind)
    for key, value in vars(optimizer).items():
        # A method on the object, such as a step() that a scheduler has wrapped, would run the original optimizer.
        if "hooks" in key or callable(getattr(kind, key, None)):
            continue
        inner = isinstance(value, Optimizer) and value is not optimizer
        vars(made)[key] = copy_optimizer(value, params) if inner else value
    groups = [group | {"params": [params[id(p)] for p in group["params"] if id(p) in params]}
              for group in optimizer.param_groups]  # fmt: skip
    made.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups})
    return made


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Leave the random state of torch, numpy and Python as it was."""
    states = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


def without_hooks(model: nn.Module) -> nn.Module:
    """Remove the user's hooks from a copy: they must see only the training itself."""
    for module in model.modules():
        for name in seams.HOOKS:
            getattr(module, name).clear()
    return model


# --- what a prediction or a plan depends on ------------------------------------------------------
def shapes_of(value: Any) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
    """Shape, dtype and requires_grad of every tensor."""
    return [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_of(value)]


def constants_of(value: Any) -> str:
    """The numbers and strings next to the tensors: a forward may branch on them."""
    return repr([leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, int | float | str | None)])


def step_key(step: TrainingStep, extra: Any) -> str:
    """A name for the cache: equal only if everything that a prediction depends on is equal."""
    inputs = step.args, step.kwargs
    groups = [{k: repr(v) for k, v in g.items() if k not in ("params", "lr")} for g in step.optimizer.param_groups]
    about = (
        _VERSION, torch.__version__, platform.node(), platform.processor(), torch.get_num_threads(), str(step.device),
        [(name, type(m).__qualname__, m.extra_repr(), m.training) for name, m in named_modules(step.model)],
        [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in step.model.named_parameters()],
        shapes_of(inputs), [t.stride() for t in tensors_of(inputs)], constants_of(inputs), repr(extra),
        type(step.optimizer).__qualname__, groups, [len(g["params"]) for g in step.optimizer.param_groups],
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
        [repr(part) for part in step.parts], step.kept_gradients, step.extra_bytes, step.batch,
    )  # fmt: skip
    return hashlib.sha256(repr(about).encode()).hexdigest()[:32]
