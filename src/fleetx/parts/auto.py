from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fleetx.part import Part, settings


@settings
class Auto(Part):
    """Measure, predict and choose the other strategies."""

    objective: Literal["throughput", "memory"] = "throughput"
    """What is made best."""
    global_batch: Annotated[int, Field(ge=1)] | None = None
    """Samples in one update over all ranks."""
    memory_budget: str | int | None = None
    """Bytes that each rank may use; found from the device when not given."""
    allow: Literal["exact", "bf16", "lossy"] = "exact"
    """Which strategies may be chosen: those that do not change the mathematics, bfloat16 too, or all."""
    trials: Annotated[int, Field(ge=0)] = 3
    """Plans that are tried for real."""
    max_seconds: Annotated[float, Field(gt=0)] = 60.0
    """The longest search."""
    cache: bool = True
    """Keep the result for the next run."""
