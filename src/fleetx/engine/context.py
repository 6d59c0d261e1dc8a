"""What an act is told besides its value: where and when it is called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.trees import LossFn, arguments, loss_by, map_tensors
from fleetx.engine.taps import tap
from fleetx.errors import UsageError
from fleetx.strategy.stage import Fact

if TYPE_CHECKING:
    from fleetx.comm.paths import Network
    from fleetx.comm.world import World
    from fleetx.engine.engine import Engine
    from fleetx.strategy.compose import Plan


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together. `buffer` is flat; `gradients` are views into it, one for each name."""

    buffer: Tensor
    gradients: list[Tensor]
    names: list[str]
    index: int


@dataclass(frozen=True)
class Batch:
    """What `fleet.forward_backward` was given, and what the loss must be multiplied by before its backward."""

    inputs: Any
    target: Any
    loss_fn: LossFn | None
    factor: float = 1.0
    weight: float | None = None  # of `fleet.weight`

    def loss(self, model: Any) -> Tensor:
        return loss_by(model if self.factor else _stopped(model), self.inputs, self.target, self.loss_fn)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments(self.inputs)


def _stopped(model: Callable[..., Any]) -> Callable[..., Any]:
    """For a batch that counts for nothing: no gradient enters, where 0 times what the loss has may be nan."""
    return lambda *args, **kwargs: map_tensors(lambda t: tap(t, torch.zeros_like), model(*args, **kwargs))


class Context:
    """Handed to every act of a part. One object lives as long as the engine; what it tells changes."""

    def __init__(self, engine: Engine, key: str, facts: frozenset[Fact]):
        self._engine, self._key, self._facts = engine, key, facts

    @property
    def state(self) -> dict[str, Any]:
        """This part's own state: whatever its `init` returned, carried across steps, saved and loaded."""
        return self._engine.state[self._key]

    @property
    def notes(self) -> dict[str, Any]:
        """What this part worked out at set-up. Not saved."""
        return self._engine.notes[self._key]

    @property
    def world(self) -> World:
        """The ranks that hold the same piece of the model as this one: where nothing divides it, all of them."""
        return self._engine.layout.replica_group

    @property
    def everyone(self) -> World:
        """All ranks, whatever they hold."""
        return self._engine.world

    def divide(self, group: World, *, reduces: bool = False) -> None:
        """Say at MODEL that these ranks hold one copy of the model together.

        reduces: do gradients come out of backward reduced between all ranks already?
        """
        self._engine.layout.shard_group, self._engine.layout.reduced = group, reduces

    def hold(self, counts: Callable[[nn.Parameter], bool], absent: Collection[str]) -> None:
        """Say which parameters this rank counts in a sum over the whole model, and which names only others hold."""
        self._engine.layout.counts, self._engine.layout.absent = counts, frozenset(absent)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self._engine.device

    @property
    def model(self) -> nn.Module:
        return self._engine.model

    @property
    def optimizer(self) -> Optimizer:
        return self._engine.optimizer

    @property
    def lr(self) -> float:
        """The rate of the first group."""
        return float(self._engine.optimizer.param_groups[0]["lr"])

    def loss(self) -> float:
        """The mean over the ranks of the loss of the last step: a collective, so every rank must ask."""
        value = self._engine.loss
        if value is None:
            raise UsageError(
                "the strategy follows the loss and does not see it in loss.backward(): call fleet.backward(loss) "
                "instead, or let the model return its loss"
            )
        total = value.detach().to(self.device, torch.float64).reshape(1).clone()
        self.world.sum(total)
        return total.item() / self.world.size

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """The name of each parameter of the model."""
        return self._engine.names

    @property
    def round(self) -> int:
        """Rounds that ended so far: equal on all ranks by construction."""
        return self._engine.round

    @property
    def clock(self) -> tuple[int, int]:
        """The round, and the steps in it so far: equal on all ranks, and after a resume."""
        return self._engine.round, self._engine.merged

    @property
    def divisor(self) -> float:
        """What makes a mean of the sum over merged steps: their number, or what `fleet.weight` says."""
        return self._engine.weights.divisor(self._engine.merged)

    @property
    def forward(self) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the FORWARD contexts anew, for a part that runs a piece of the forward again."""
        return self._engine.forward_context

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the forward that begins was called with."""
        return self._engine.inputs

    @property
    def plan(self) -> Plan:
        return self._engine.plan

    @property
    def network(self) -> Network:
        """The way to the other ranks. What a part wants of it is said at MODEL, before it is opened."""
        return self._engine.network

    @property
    def local(self) -> bool:
        """Does each rank update with a gradient of its own?"""
        return Fact.LOCAL in self._facts

    @property
    def scaled(self) -> bool:
        """Is the gradient multiplied by a loss scale, so that an overflow may be found later?"""
        return Fact.SCALED in self._facts

    @property
    def updated(self) -> bool:
        """Did this round apply its update, or was that withheld?"""
        return self._engine.updated

    @property
    def factor(self) -> float:
        """By what the gradient in hand is multiplied: the loss scale, and the divisor of the steps it is a sum of."""
        return self._engine.gradient_factor()

    def replicate(self, *, bucket_cap_mb: float, find_unused_parameters: bool) -> None:
        """Ask the engine to reduce gradients between the ranks of this model, bucket by bucket, during backward."""
        self._engine.reducer_settings = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
        }

    def anywhere(self, found: Tensor) -> bool:
        """Is this true on any rank? Costs a collective only where ranks may see different gradients."""
        if self._facts & {Fact.LOCAL, Fact.PARTED, Fact.STAGED}:
            self._engine.world.maximum(found)
        return bool(found.item())

    def norm(self, grads: list[Tensor]) -> Tensor:
        """The 2-norm of the whole gradient, wherever its pieces are."""
        return self._engine.layout.norm(grads, self._engine.gradients.params())
