from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetx.part import Part, settings


@settings
class Pipeline(Part):
    """Cut the model into stages on different ranks, and the batch into micro-batches that flow through them."""

    micro_batch: Annotated[int, Field(ge=1)] = 1
    """The number of micro-batches in a batch."""
    accumulate_steps: Annotated[int, Field(ge=1)] = 1
    """The later name of `micro_batch`."""
    micro_batch_size: Annotated[int, Field(ge=1)] = 1
    """Samples in a micro-batch."""
    schedule_mode: str = "1F1B"
    """The order of forwards and backwards."""
