from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetx.part import Names, Part, settings


@settings
class LAMB(Part):
    """Layer-wise adaptive moments: Adam whose rate is scaled by |p| / |u| for each tensor."""

    lamb_weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """The weight decay inside of the formula."""
    exclude_from_weight_decay: Names = Field(default_factory=list)
    """Parts of parameter names that get neither decay nor trust ratio."""
    always_adapt: bool = False
    """Keep the trust ratio for excluded parameters too, as Paddle 2.0 did."""
