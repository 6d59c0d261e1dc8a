"""What an act is told besides its value: where and when it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fleetx.stage import Fact

if TYPE_CHECKING:
    from fleetx.engine import Engine
    from fleetx.world import World


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together. `buffer` is flat; `gradients` are views into it, one for each name."""

    buffer: Tensor
    gradients: list[Tensor]
    names: list[str]
    index: int


class Moment:
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
        return self._engine.world

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self._engine.device

    @property
    def model(self) -> nn.Module:
        return self._engine.model

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """The name of each parameter of the model."""
        return self._engine.names

    @property
    def round(self) -> int:
        """Rounds that ended so far: equal on all ranks by construction."""
        return self._engine.round

    @property
    def merged(self) -> int:
        """How many steps the gradient of this round was summed over."""
        return self._engine.merged

    @property
    def forward(self) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the FORWARD contexts anew, for a part that runs a piece of the forward again."""
        return self._engine.forward_context

    def replicate(self, *, bucket_cap_mb: float, find_unused_parameters: bool) -> None:
        """Ask the engine to reduce gradients between the ranks of this model, bucket by bucket, during backward."""
        self._engine.reducer_settings = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
        }

    def anywhere(self, found: Tensor) -> bool:
        """Is this true on any rank? Costs a collective only where ranks may see different gradients."""
        if self._facts & {Fact.LOCAL, Fact.PARTED}:
            self.world.maximum(found)
        return bool(found.item())
