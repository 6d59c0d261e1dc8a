from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetx.part import Part, settings


@settings
class LocalSGD(Part):
    """Let every rank update alone, and average the parameters once in `k_steps` rounds."""

    k_steps: Annotated[int, Field(ge=1)] = 1
    """Rounds between two averages."""
    begin_step: Annotated[int, Field(ge=1)] = 1
    """Until this round the parameters are averaged in every round."""
