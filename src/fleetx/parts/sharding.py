from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fleetx.part import Part, settings


@settings
class Sharding(Part):
    """Keep only a part of the parameters, gradients and optimizer state on each rank."""

    sharding_degree: Annotated[int, Field(ge=1)] = 8
    """Ranks over which the model is divided."""
    stage: Literal[1, 2, 3] = 1
    """1: optimizer state, 2: gradients too, 3: parameters too."""
    offload: bool = False
    """Keep what is divided in host memory."""
    hybrid_dp: bool = False
    """Data parallelism between groups of `sharding_degree` ranks."""
    sharding_group_size: Annotated[int, Field(ge=1)] = 8
    """The earlier name of `sharding_degree`."""
    fuse_broadcast_MB: Annotated[float, Field(gt=0)] = 32.0  # noqa: N815  Paddle's name
    """The size of a segment."""
    sharding_segment_strategy: Literal["segment_broadcast_MB", "segment_anchors"] = "segment_broadcast_MB"
    """How segments are cut."""
    segment_broadcast_MB: Annotated[float, Field(gt=0)] = 32.0  # noqa: N815  Paddle's name
    """The later name of `fuse_broadcast_MB`."""
    segment_anchors: list[str] = Field(default_factory=list)
    """Where segments begin."""
    mp_degree: Annotated[int, Field(ge=1)] = 1
    """Ranks of tensor parallelism."""
    dp_degree: Annotated[int, Field(ge=1)] = 1
    """Ranks of data parallelism."""
    pp_degree: Annotated[int, Field(ge=1)] = 1
    """Ranks of pipeline parallelism."""
    gradient_merge_acc_step: Annotated[int, Field(ge=1)] = 1
    """Merged steps."""
    optimize_offload: bool = False
    """Keep the optimizer state in host memory."""
    pp_allreduce_in_optimize: bool = False
    """Reduce in the update phase of the pipeline."""
