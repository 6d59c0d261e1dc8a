from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fleetx.base import sizes
from fleetx.strategy.part import Part, settings

ASKED = "FLEETX_PLAN"  # set by `fleetx plan`: settings of auto, as YAML; the script ends when the plan is there


@settings
class Auto(Part):
    """Measure, predict and choose the other strategies, when a model is distributed; what the user set is kept.

    Every part offers settings and tells what they cost; those that compose are predicted, the best are tried in child
    processes, and the winner is written to a file with which the run can be repeated.
    """

    objective: Literal["throughput", "memory"] = "throughput"
    """What is made best."""
    global_batch: Annotated[int, Field(ge=1)] | None = None
    """Samples in one update over all ranks. Without it every rank goes on with batches of the sample's size."""
    memory_budget: str | Annotated[int, Field(gt=0)] | None = None
    """Bytes that each rank may use, such as "6GiB"; by default what the device, or the machine's share, has."""
    allow: Literal["exact", "bf16", "lossy"] = "exact"
    """Which strategies may be chosen: those that do not change the mathematics, bfloat16 too, or all."""
    trials: Annotated[int, Field(ge=0)] = 3
    """Plans that are tried for real."""
    max_seconds: Annotated[float, Field(gt=0)] = 60.0
    """After so many no plan is tried any more."""
    cache: bool = True
    """Keep the result for the next run."""

    is_meta: ClassVar[bool] = True
    costs: ClassVar[str] = "time: a search before training, of about max_seconds"

    def problems(self) -> Iterator[str]:
        if isinstance(self.memory_budget, str):
            try:
                sizes.parse_bytes(self.memory_budget)
            except ValueError as error:
                yield f"memory_budget: {error}"
