from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from fleetx.strategy.part import Part, settings


@settings
class BatchSplit(Part):
    """Declare how the batch of an update is split, so that training can check it: total = feed x merged x replicas.

    Written by `auto`, so that its strategy can be loaded and run with the same batch. It changes nothing in training.
    """

    feed: Annotated[int, Field(ge=1)] | None = None
    """Samples per step on each replica."""
    merged: Annotated[int, Field(ge=1)] = 1
    """Steps per update: `k_steps` of gradient_merge."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Replicas of the model: the number of ranks, or of pipelines."""

    costs: ClassVar[str] = "nothing: batches are checked"

    def problems(self) -> Iterator[str]:
        if self.feed is None:
            yield "feed is not set: set it to the number of samples per step, or turn batch off"
