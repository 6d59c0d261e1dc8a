from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fleetx.base import sizes
from fleetx.strategy.part import Part, settings

PLAN = "FLEETX_PLAN"  # set by `fleetx plan`: settings of auto, as YAML; the script exits once the plan is made


@settings
class Auto(Part):
    """Measure, predict and choose the other strategies when a model is distributed. The user's settings are kept.

    Every part offers settings and reports their cost. Combinations that compose are predicted, and the best few are
    tried in child processes.
    """

    objective: Literal["throughput", "memory"] = "throughput"
    """What to optimize for."""
    global_batch: Annotated[int, Field(ge=1)] | None = None
    """Samples per update over all ranks. By default, every rank keeps the batch size of the sample."""
    memory_budget: Annotated[
        str | Annotated[int, Field(gt=0)] | None, Field(description="a size such as '6GiB', or a number of bytes")
    ] = None
    """Memory that each rank may use, such as "6GiB"; by default the device's, or a share of the machine's."""
    allow: Literal["exact", "bf16", "lossy"] = "exact"
    """Which strategies may be chosen: those that do not change the math, these and bfloat16, or all of them."""
    trials: Annotated[int, Field(ge=0)] = 3
    """How many plans to run for real."""
    max_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Start no further trial after this time."""
    cache: bool = True
    """Store the result for the next run."""
    output: str | None = None
    """YAML file to write the chosen strategy to; to repeat the run, read it with `DistributedStrategy.load`."""

    is_meta: ClassVar[bool] = True
    costs: ClassVar[str] = "time: a search before training, of about max_seconds"

    def problems(self) -> Iterator[str]:
        if isinstance(self.memory_budget, str):
            try:
                sizes.parse_bytes(self.memory_budget)
            except ValueError as error:
                yield f"memory_budget: {error}"
