"""What an act receives besides its value.

Context        the part's own state and notes, the ranks, the model; for every act
SetupContext   MODEL and UPDATE: also arranges how the model is divided and reduced
StepContext    all other stages: also the values of the step that is running
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from fleetx.base.trees import LossFn, arguments, loss_by, map_tensors
from fleetx.comm.paths import Network
from fleetx.comm.world import World
from fleetx.engine.dtensors import local
from fleetx.engine.loss_weights import LossWeights
from fleetx.engine.run import Doubt
from fleetx.engine.taps import tap
from fleetx.errors import UsageError
from fleetx.strategy.compose import Plan
from fleetx.strategy.stage import Fact, Stage

if TYPE_CHECKING:
    from fleetx.engine.rounds import Rounds


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together. `buffer` is flat; `gradients` are views into it, one per name."""

    buffer: Tensor
    gradients: list[Tensor]
    names: list[str]
    index: int


@dataclass(frozen=True)
class Outgoing(Bucket):
    """A bucket to average over the ranks of a network: of gradients, or of how far the parameters have moved.

    factor: what its values are multiplied by, such as a loss scale.
    undoable: can the update for which it is sent still be withheld?
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


def _shows(path: str) -> Any:
    """A property that reads this attribute of the run."""
    return property(attrgetter(f"_run.{path}"))


class Context:
    """Passed to every act of a part. It lives as long as the engine and always shows the current values."""

    def __init__(self, run: Rounds, key: str, facts: frozenset[Fact] = frozenset()):
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
    world: World = _shows("world")  # all ranks
    replica_group: World = _shows("layout.replica_group")  # those that train the same stage on different batches
    island: World | None = _shows("layout.island")  # those that update with the same gradient, unless all ranks do
    network: Network = _shows("network")  # paths to the other ranks that hold the same as this one, such as its shards

    # --- what is trained ---
    device: torch.device = _shows("device")  # of the model
    model: nn.Module = _shows("model")
    optimizer: Optimizer = _shows("optimizer")
    names: Mapping[nn.Parameter, str] = _shows("names")  # of the parameters
    plan: Plan = _shows("plan")
    round: int = _shows("round")  # rounds that have ended: 0 until the first update is done; equal on all ranks
    clock: tuple[int, int] = _shows("clock")  # (round, steps in it so far): equal on all ranks and after a resume
    reduced: bool = _shows("layout.reduced")  # does backward itself reduce gradients, as under sharding?
    # Enters the FORWARD contexts again, for a part that reruns a piece of the forward.
    forward: Callable[[], AbstractContextManager[Any]] = _shows("forward_context")

    @property
    def coded(self) -> bool:
        """Are the values that the ranks send rounded, or partly left out?"""
        return bool(self._run.plan.at(Stage.WIRE))

    @property
    def per_rank(self) -> bool:
        """Does each rank update with its own gradient?"""
        return Fact.LOCAL in self._facts

    @property
    def apart(self) -> bool:
        """Do ranks have different parameters between two averages?"""
        return self._run.plan.makes(Fact.LOCAL)

    @property
    def parted(self) -> bool:
        """Does this rank hold only a part of the model?"""
        return self._run.layout.shard_group is not None

    @property
    def finds_unused(self) -> bool:
        """May ranks use different parameters? Known once `replicate` has been called."""
        return bool(self._run.reducer_settings and self._run.reducer_settings["find_unused_parameters"])


class SetupContext(Context):
    """For acts at MODEL and UPDATE, which run once."""

    absent: frozenset[str] = _shows("layout.absent")  # names of the parameters and buffers that only other ranks hold

    def divide(
        self, group: World, *, reduced: bool = False, leaves: Callable[[], Iterable[Tensor]] | None = None
    ) -> None:
        """Declare that these ranks together hold one copy of the model.

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

        From then on, `network` connects the islands, and each of them counts once.
        """
        run, replicas = self._run, self.replica_group
        island = replicas.split([list(range(first, first + size)) for first in range(0, replicas.size, size)])
        run.layout.island = island
        run.network.inside, run.network.equal = size, True
        run.weights = LossWeights(run.plan, island, island=True)
        return run.network.part(island)

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
        """Have `StepContext.step_square` measured once per `every` rounds."""
        self._run.step_norm.every = every

    def on_release(self, undo: Callable[[], None]) -> None:
        """Have `fleet.release` call this. The engine's hooks and wrapped modules are removed automatically."""
        self._run.undo.append(undo)


class StepContext(Context):
    """For acts that run in every forward, backward or step."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]] = _shows("step.inputs")  # of the forward that is running
    updated: bool = _shows("updated")  # did this round apply its update?
    # The squared norm of one step's gradient on this rank, not yet merged or reduced; None: not measured.
    step_square: Tensor | None = _shows("step_norm.square")

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of the optimizer that this rank holds. The same list object until they change."""
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

    def scale_rate(self, factor: float) -> None:
        """Multiply the learning rates of all groups in this update only."""
        self._run.rates.scale(factor)

    def loss(self) -> float | None:
        """The last step's loss, averaged over the ranks of the replica group that had a batch; None: no rank had one.

        A collective: every rank must call it.
        """
        step = self._run.step
        trained = self.updated or step.backward != -1
        loss = step.loss if trained else None  # else it is that of an earlier batch
        found = torch.tensor([0, loss is not None, trained and loss is None], dtype=torch.float64, device=self.device)
        if loss is not None:
            found[0] = loss.detach().reshape(())
        self.replica_group.sum(found)
        total, known, unseen_on = found.tolist()
        if unseen_on:  # on every rank, so that none waits for one that has stopped
            raise UsageError(
                "this strategy needs the loss, which cannot be seen from inside loss.backward(): call "
                "fleet.backward(loss) instead, or have the model return its loss"
            )
        return total / known if known else None

    @property
    def divisor(self) -> float:
        """What the sum over merged steps is divided by: their number, or what follows from `fleet.weight`."""
        return self._run.weights.divisor(self._run.merged)

    @property
    def withholds(self) -> bool:
        """May the update still be withheld after backward, because a gradient on some rank is not finite?"""
        return Fact.SCALED in self._facts or self._run.checks.looks

    def mean(self, bucket: Outgoing) -> Future[Tensor]:
        """Start replacing a bucket with its mean over the ranks of its network, coded as the strategy says."""
        return self._run.mean(bucket)

    def broadcast_buffers(self, skip: Collection[Tensor] = ()) -> None:
        """Copy the buffers of rank 0 to the replica group, unless the user turned that off. A collective."""
        if self._run.shares_buffers:
            self._run.buffers.send(self.replica_group, skip=skip)

    def broadcast_in_island(self) -> None:
        """Copy the buffers of an island's first rank to the others, as `broadcast_buffers` does."""
        if self._run.shares_buffers and self.island is not None:
            self._run.island_buffers.send(self.island)

    def withhold_if(self, found: Tensor, then: Callable[[bool], None]) -> None:
        """Withhold this update on every rank if `found` (one element) is nonzero on any; `then` is told if it was.

        The value stays on the device until all acts have run; then all such values are read at once. This is a
        collective only if ranks may see different gradients.
        """
        everywhere = bool(self._facts & {Fact.LOCAL, Fact.PARTED, Fact.STAGED})
        self._run.step.doubts.append(Doubt(found, everywhere, then))

    def norm(self, grads: list[Tensor]) -> Tensor:
        """The 2-norm of the whole gradient, over all shards and stages."""
        self._run.step.norm = norm = self._run.layout.norm(grads, self._run.gradients.params())
        return norm
