from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetx.part import Part, settings


@settings
class DGC(Part):
    """Deep gradient compression: send only the largest values, keep the rest with momentum for later steps."""

    rampup_begin_step: Annotated[int, Field(ge=0)] = 0
    """The step at which compression begins."""
    rampup_step: Annotated[int, Field(ge=1)] = 1
    """Steps over which `sparsity` is walked through."""
    sparsity: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default_factory=lambda: [0.999])
    """The share of values that is not sent, in order of time."""
