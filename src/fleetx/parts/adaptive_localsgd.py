from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetx.part import Part, settings


@settings
class AdaptiveLocalSGD(Part):
    """LocalSGD whose period follows the loss and the learning rate."""

    init_k_steps: Annotated[int, Field(ge=1)] = 1
    """The first period."""
    begin_step: Annotated[int, Field(ge=1)] = 1
    """Until this round the parameters are averaged in every round."""
    max_k_steps: Annotated[int, Field(ge=1)] = 16
    """The longest period."""
