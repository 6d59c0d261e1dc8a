"""What an act is told besides its value.

Context        the part's own state and notes, the ranks, the model; for every act
SetupContext   MODEL and UPDATE: also arranges how the model is divided and reduced
StepContext    all other stages: also the values of the step that is running
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from fleetx.base.trees import LossFn, arguments, loss_by, map_tensors
from fleetx.comm.paths import Network
from fleetx.comm.world import World
from fleetx.engine.dtensors import local
from fleetx.engine.loss_weights import LossWeights
from fleetx.engine.run import Doubt, Run
from fleetx.engine.taps import tap
from fleetx.errors import UsageError
from fleetx.strategy.compose import Plan
from fleetx.strategy.stage import Fact, Stage


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together. `buffer` is flat; `gradients` are views into it, one per name."""

    buffer: Tensor
    gradients: list[Tensor]
    names: list[str]
    index: int


@dataclass(frozen=True)
class Outgoing(Bucket):
    """A bucket that is to be averaged over the ranks of a network: of gradients, or of what parameters have moved.

    factor: what its values are multiplied by, such as a loss scale.
    undoable: may the update for which it is sent still be withheld?
    """

    network: Network
    factor: float = 1.0
    undoable: bool = False


@dataclass(frozen=True)
class StepInput:
    """The arguments of `fleet.forward_backward`, and the factor that the loss is multiplied by before its backward."""

    inputs: Any
    target: Any
    loss_fn: LossFn | None
    factor: float = 1.0
    weight: float | None = None  # from `fleet.weight`

    def loss(self, model: Any) -> Tensor:
        return loss_by(model if self.factor else _stopped(model), self.inputs, self.target, self.loss_fn)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments(self.inputs)


def _stopped(model: Callable[..., Any]) -> Callable[..., Any]:
    """For a batch of weight 0: block its gradient, because 0 times a nan in the loss would still be nan."""
    return lambda *args, **kwargs: map_tensors(lambda t: tap(t, torch.zeros_like), model(*args, **kwargs))


class Context:
    """Passed to every act of a part. It lives as long as the engine and always shows the current values."""

    def __init__(self, run: Run, key: str, facts: frozenset[Fact] = frozenset()):
        self._run, self._key, self._facts = run, key, facts

    # --- this part's own ---
    @property
    def state(self) -> dict[str, Any]:
        """What this part's `init` returned, carried across steps, saved and loaded."""
        return self._run.state[self._key]

    @property
    def notes(self) -> dict[str, Any]:
        """What this part worked out at set-up. Not saved."""
        return self._run.notes[self._key]

    @property
    def in_progress(self) -> dict[str, Any]:
        """What this part has under way. Not saved, and dropped when a checkpoint is loaded."""
        return self._run.in_progress[self._key]

    # --- the ranks ---
    @property
    def world(self) -> World:
        """All ranks."""
        return self._run.world

    @property
    def replica_group(self) -> World:
        """The ranks that train the same stage of the model on different batches. Without stages: all ranks."""
        return self._run.layout.replica_group

    @property
    def island(self) -> World | None:
        """The ranks that update with the same gradient as this one, where islands of ranks update on their own."""
        return self._run.layout.island

    @property
    def network(self) -> Network:
        """The paths to the other ranks that hold what this one holds. Without sharding: to the replica group."""
        return self._run.network

    # --- what is trained ---
    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._run.device

    @property
    def model(self) -> nn.Module:
        return self._run.model

    @property
    def optimizer(self) -> Optimizer:
        return self._run.optimizer

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """The name of each parameter."""
        return self._run.names

    @property
    def plan(self) -> Plan:
        return self._run.plan

    @property
    def coded(self) -> bool:
        """Is what the ranks send rounded or left out in part?"""
        return bool(self._run.plan.at(Stage.WIRE))

    @property
    def forward(self) -> Callable[[], AbstractContextManager[Any]]:
        """Enter the FORWARD contexts again, for a part that runs a piece of the forward again."""
        return self._run.forward_context

    @property
    def round(self) -> int:
        """Rounds that have ended, so 0 until the first update is done. Equal on all ranks and after a resume."""
        return self._run.round

    @property
    def reduced(self) -> bool:
        """Does backward itself reduce gradients, as under sharding?"""
        return self._run.layout.reduced

    @property
    def per_rank(self) -> bool:
        """Does each rank update with its own gradient?"""
        return Fact.LOCAL in self._facts

    @property
    def apart(self) -> bool:
        """Do ranks have different parameters between two averages?"""
        return any(Fact.LOCAL in act.claim.makes for act in self._run.plan.acts)

    @property
    def parted(self) -> bool:
        """Does this rank hold only a part of the model?"""
        return self._run.layout.shard_group is not None

    @property
    def finds_unused(self) -> bool:
        """May ranks use different parameters? Known once `replicate` has been called."""
        return bool(self._run.reducer_settings and self._run.reducer_settings["find_unused_parameters"])

    @property
    def clock(self) -> tuple[int, int]:
        """(round, steps in it so far): equal on all ranks and after a resume."""
        return self._run.clock


class SetupContext(Context):
    """For acts at MODEL and UPDATE, which run once."""

    def divide(
        self, group: World, *, reduced: bool = False, leaves: Callable[[], Iterable[Tensor]] | None = None
    ) -> None:
        """Declare that these ranks hold one copy of the model together.

        reduced: does backward itself reduce gradients over the group, and hand them to `reduce`?
        leaves: the tensors in which backward accumulates, if they are not the parameters.
        """
        run, layout = self._run, self._run.layout
        layout.shard_group, layout.reduced, layout.leaves = group, reduced, leaves
        if reduced and self.apart:
            layout.island = group
            run.weights = LossWeights(run.plan, group, island=True)

    @property
    def opens(self) -> bool:
        """Does the step that is running update?"""
        return self._run.opens()

    def reduce(self, bucket: Bucket) -> None:
        """Exchange gradients of shards with the ranks that hold the same shards, as the strategy says."""
        reduced = self._run.reduce(bucket).wait()
        if reduced is not bucket.buffer:
            bucket.buffer.copy_(reduced)

    def make_islands(self, size: int) -> Network:
        """Group consecutive replicas that update with the same gradient. Returns the paths within this rank's island.

        Then `network` leads from island to island: each of them counts once.
        """
        run, replicas = self._run, self.replica_group
        island = replicas.split([list(range(first, first + size)) for first in range(0, replicas.size, size)])
        run.layout.island = island
        run.network.inside, run.network.equal = size, True
        run.weights = LossWeights(run.plan, island, island=True)
        return run.network.part(island)

    @property
    def absent(self) -> frozenset[str]:
        """Names of the parameters and buffers that only other ranks hold."""
        return self._run.layout.absent

    def hold(self, counts: Callable[[nn.Parameter], bool], absent: Collection[str]) -> None:
        """Declare which parameters this rank counts in a sum over the model, and which names only other ranks hold."""
        self._run.layout.counts, self._run.layout.absent = counts, frozenset(absent)
        if hasattr(self._run, "gradients"):
            self._run.gradients.forget()

    def replicate(self, *, bucket_cap_mb: float, find_unused_parameters: bool, broadcast_buffers: bool) -> None:
        """Have gradients reduced within the replica group, bucket by bucket, during backward."""
        self._run.shares_buffers = broadcast_buffers
        self._run.reducer_settings = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
        }

    def measure_steps(self, every: int) -> None:
        """Have `StepContext.step_square` measured, in every so many rounds."""
        self._run.step_norm.every = every

    def on_release(self, undo: Callable[[], None]) -> None:
        """Have `fleet.release` call this. Wrapped modules and hooks of the engine are undone automatically."""
        self._run.undo.append(undo)


class StepContext(Context):
    """For acts that run in every forward, backward or step."""

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the forward that is running."""
        return self._run.step.inputs

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of the optimizer that this rank holds; the same list until there are others."""
        return self._run.gradients.params()

    @property
    def trained(self) -> dict[str, Tensor]:
        """What this rank holds of each parameter of the optimizer, by name, to be changed in place."""
        run = self._run
        return {run.names[p]: local(p).detach() for p in run.gradients.params() if p in run.names}

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return float(self._run.optimizer.param_groups[0]["lr"])

    @property
    def step_square(self) -> Tensor | None:
        """The squared norm of one step's gradient on this rank, not yet merged or reduced; None: not measured."""
        return self._run.step_norm.square

    def scale_rate(self, factor: float) -> None:
        """Multiply the learning rates of all groups in this update only."""
        self._run.rates.scale(factor)

    def loss(self) -> float:
        """The last step's loss, averaged over the replica group. A collective: every rank must call it."""
        value = self._run.step.loss
        if value is None:
            raise UsageError(
                "this strategy follows the loss, which cannot be seen from inside loss.backward(): call "
                "fleet.backward(loss) instead, or have the model return its loss"
            )
        total = value.detach().to(self.device, torch.float64).reshape(1).clone()
        self.replica_group.sum(total)
        return total.item() / self.replica_group.size

    @property
    def divisor(self) -> float:
        """Turns the sum over merged steps into their mean: their number, or what `fleet.weight` gave."""
        return self._run.weights.divisor(self._run.merged)

    @property
    def scaled(self) -> bool:
        """Is the gradient multiplied by a loss scale, so that an overflow may still be found?"""
        return Fact.SCALED in self._facts

    def mean(self, bucket: Outgoing) -> Future[Tensor]:
        """Start to replace a bucket by its mean over the ranks of its network, coded as the strategy says."""
        return self._run.mean(bucket)

    def broadcast_buffers(self, skip: Collection[Tensor] = ()) -> None:
        """Copy the buffers of rank 0 to the replica group, unless the user turned that off. A collective."""
        if self._run.shares_buffers:
            self._run.buffers.send(self.replica_group, skip=skip)

    def broadcast_in_island(self) -> None:
        """Copy the buffers of an island's first rank to the others, as `broadcast_buffers` does."""
        if self._run.shares_buffers and self.island is not None:
            self._run.island_buffers.send(self.island)

    @property
    def updated(self) -> bool:
        """Did this round apply its update?"""
        return self._run.updated

    def withhold_if(self, found: Tensor, then: Callable[[bool], None]) -> None:
        """Withhold this update on every rank if `found` (one element) is not zero on any; `then` learns whether it is.

        The value stays on the device until all acts have run. Then all such values are read at once. A collective only
        where ranks may see different gradients.
        """
        everywhere = bool(self._facts & {Fact.LOCAL, Fact.PARTED, Fact.STAGED})
        self._run.step.doubts.append(Doubt(found, everywhere, then))

    def norm(self, grads: list[Tensor]) -> Tensor:
        """The 2-norm of the whole gradient, over all shards and stages."""
        self._run.step.norm = norm = self._run.layout.norm(grads, self._run.gradients.params())
        return norm
