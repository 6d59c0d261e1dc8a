from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetx.part import Names, Part, settings


@settings
class LARS(Part):
    """Layer-wise adaptive rate scaling: momentum whose rate is scaled by |p| / |g| for each tensor."""

    lars_coeff: Annotated[float, Field(gt=0)] = 0.001
    """The trust coefficient."""
    lars_weight_decay: Annotated[float, Field(ge=0)] = 0.0005
    """The weight decay inside of the formula."""
    epsilon: Annotated[float, Field(ge=0)] = 0.0
    """Added to the denominator."""
    exclude_from_weight_decay: Names = Field(default_factory=list)
    """Parts of parameter names that get plain momentum without decay."""
