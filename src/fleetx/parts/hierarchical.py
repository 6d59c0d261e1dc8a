from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from fleetx.part import Part, settings


@settings
class Hierarchical(Part):
    """Reduce inside of a group, between the leaders of the groups, and back."""

    inter_nranks: Annotated[int, Field(ge=1)] = 1
    """Ranks in a group."""

    switch: ClassVar[str] = "use_hierarchical_allreduce"
    flat: ClassVar[dict[str, str]] = {"hierarchical_allreduce_inter_nranks": "inter_nranks"}
