"""The data of one training: what the engine works on, and all that an act's context can see of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from fleetx.base.module_names import plain_name
from fleetx.comm.paths import Network
from fleetx.comm.world import World
from fleetx.engine import layout
from fleetx.engine.buffers import ModelBuffers
from fleetx.engine.gradients import Gradients
from fleetx.engine.loss_weights import LossWeights
from fleetx.strategy.compose import Plan
from fleetx.strategy.part import Part


@dataclass(frozen=True)
class Doubt:
    """A reason to withhold the update. It stays on the device: reading it makes the host wait."""

    found: Tensor  # one element; not zero: withhold the update
    everywhere: bool  # may the ranks see different gradients, so that all must be asked?
    then: Callable[[bool], None]  # called with the answer


@dataclass
class Step:
    """What has happened since the last optimizer.step(). The engine makes a new one after each step."""

    opens: bool | None = None  # does this step update? The gate is asked once
    called: bool = False  # has the model returned something that a backward can enter?
    backward: int = -1  # torch's number of the backward that last entered the model
    tapped: bool = False  # has a backward entered through the model's output?
    scaled_at_loss: bool = False  # is fleet.backward running, which scales the loss itself?
    reads: bool = False  # does that backward only return gradients, as torch.autograd.grad and torch.func do?
    create_graph: bool = False  # was a backward itself made differentiable?
    flushing: bool = False  # is this fleet.flush, which updates whatever the gate says?
    collected: int = 0  # merged steps in the gradients that are being reduced outside a backward
    loss: Tensor | None = None  # of this step or the last one, if it could be seen
    inputs: Any = None  # of the forward that is running
    norm: Tensor | None = None  # of the gradient, if an act has computed it
    finite: bool = True  # was every gradient that was looked at finite?
    overflowed: bool = False  # was the update withheld because of the loss scale?
    made_by_torch: bool = False  # not a step: torch.distributed.checkpoint creates the optimizer's state
    own: dict[str, Tensor] | None = None  # this rank's own part of a loaded model, to be restored once more
    doubts: list[Doubt] = field(default_factory=list)  # what GRADIENT found; read together, after the last act

    def next(self) -> Step:
        return Step(loss=self.loss)


class Rates:
    """Scales the learning rates of all groups for one update, then restores them bit for bit, for the schedulers."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._before: list[tuple[dict[str, Any], float | Tensor]] = []
        self.factor = 1.0  # of every update

    def scale(self, factor: float) -> None:
        """Scale until `restore`, which the engine calls after the update."""
        scaled = set[int]()  # tensors, which groups may share
        for group in self._optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, Tensor):
                if id(rate) in scaled:
                    continue
                scaled.add(id(rate))
                self._before.append((group, rate.clone()))
                rate.mul_(factor)  # in place, because a captured or compiled step reads this tensor
            else:
                self._before.append((group, rate))
                group["lr"] = rate * factor

    def restore(self) -> None:
        while self._before:
            group, rate = self._before.pop()
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate


class StepNorm:
    """The norm of one step's gradient on this rank, before it is merged or reduced. It stays on the device.

    Measured if a part asks for it: if a round merges steps, on the gradient of its first step, which the gate
    withholds; otherwise, on the buckets of the reduction before they are sent.
    """

    def __init__(self) -> None:
        self.every = 0  # rounds between measurements; 0: no part asks
        self.square: Tensor | None = None  # of the current round
        self.backwards = 0  # in the current round

    def due(self, round: int) -> bool:
        return self.every > 0 and round % self.every == 0

    @torch.no_grad()
    def add(self, grads: list[Tensor], factor: float) -> None:
        """Add a piece of the gradient, which is still multiplied by this factor."""
        square = get_total_norm(grads).double().square() / factor**2
        self.square = square if self.square is None else self.square + square

    def begin_backward(self) -> None:
        """Start again: the buckets of several backwards in one step do not add up to a gradient."""
        self.backwards += 1
        self.square = None

    def end_round(self) -> None:
        self.square, self.backwards = None, 0


class Run:
    """One model, one optimizer, one plan, and where their training stands. Data only: `Engine` adds the behavior."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, world: World):
        self.plan, self.model, self.optimizer = plan, model, optimizer
        self.users_kind = type(optimizer)  # a part may change it
        self.world = world = world.owned(self)  # its groups end with this training
        self.names: Mapping[nn.Parameter, str] = {p: plain_name(n) for n, p in model.named_parameters()}
        self.device: torch.device = next((p.device for p in self.names), world.device)
        self.round = 0  # rounds that have ended, whether or not they applied an update
        self.merged = 0  # steps in the current round, the current one included once it has stepped
        self.saved_at: tuple[int, int] | None = None  # the clock when a checkpoint was last made
        self.loaded = False  # was fleet.load called after the ranks were last compared?
        self.blank_state = False  # has torch.distributed.checkpoint made the optimizer's state, before any update?
        self.updated = False  # did the last optimizer.step() apply an update?
        self.step = Step()
        self.state: dict[str, dict[str, Any]] = self.initial_state()  # of each part: saved and loaded
        self.notes: dict[str, dict[str, Any]] = {key_of(p): {} for p in plan.parts}  # of each part: not saved
        self.in_progress: dict[str, dict[str, Any]] = {key_of(p): {} for p in plan.parts}  # dropped by a load
        self.extra: dict[str, Any] = {}  # what a front end wants to find again after a resume
        self.reducer_settings: dict[str, Any] | None = None  # set by the part that asks for a reducer
        self.shares_buffers = True  # does every rank copy the buffers of rank 0 after a round?
        self.buffers, self.island_buffers = ModelBuffers(model), ModelBuffers(model)
        self.undo: list[Callable[[], None]] = []  # what `release` calls, last first
        self.modules = weakref.WeakSet(model.modules())  # parts may wrap them; the user may replace some
        self.released = False
        self.counts_feed = False  # does anything need `feed`?
        self.feed = 0  # samples of the last step on this rank
        self.check_feed: Callable[[int], None] | None = None  # checks `feed` against the plan
        self.lent = ""  # to what the model is lent, while its parameters are not those of the training
        self.rates, self.step_norm = Rates(optimizer), StepNorm()
        self.gradients: Gradients  # made when the optimizer is final
        self.layout = layout.of(plan.parts, model, world)
        self.weights = LossWeights(plan, self.layout.replica_group)
        self.network = Network(self.layout.replicas)
        # Not at exit: there, `fleet` closes everything in the right order.
        weakref.finalize(self, self.network.close).atexit = False

    @property
    def clock(self) -> tuple[int, int]:
        """(round, steps in it so far)."""
        return self.round, self.merged

    def drop_blank_state(self) -> None:
        """Drop state that torch has made: in it, Adam has already counted a step. The optimizer then makes its own."""
        if self.blank_state:
            self.optimizer.state.clear()
            self.blank_state = False

    def initial_state(self) -> dict[str, dict[str, Any]]:
        return {key_of(part): self.initial(part) for part in self.plan.parts}

    def initial(self, part: Part) -> dict[str, Any]:
        return part.init({name: p for p, name in self.names.items()})


def key_of(part: Any) -> str:
    """The key of a part's state in a checkpoint."""
    return type(part).__name__
