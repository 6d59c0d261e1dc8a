"""`with fleet.device_guard("stage:0"):` places the layers constructed inside on a stage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fleetx.errors import UsageError

_MARK = "_fleetx_stage"  # a plain number on the module, which copies and pickles preserve


@contextmanager
def device_guard(device: str) -> Iterator[None]:
    """Place modules constructed inside on this stage: "gpu:0", "cpu:0" and "stage:0" all mean the first.

    The number counts stages, as in Paddle. The launcher decides which device a stage runs on.
    """
    match = re.fullmatch(r"(gpu|cpu|stage):(\d+)", device) if isinstance(device, str) else None
    if match is None:
        raise UsageError(f"device_guard({device!r}): use 'stage:0', 'gpu:0' or 'cpu:0', with the number of the stage")
    stage = int(match[2])
    before: Any = nn.Module.__init__

    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        self.__dict__[_MARK] = stage

    nn.Module.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = before  # type: ignore[method-assign]


def placements(model: nn.Module) -> dict[str, int]:
    """The stage of every module that was placed, by name."""
    return {name: m.__dict__[_MARK] for name, m in model.named_modules() if _MARK in m.__dict__}


def problems(model: nn.Module) -> Iterator[str]:
    """What is wrong with the placements, if there are any."""
    stages = sorted(set(placements(model).values()))
    if not stages:
        return
    unplaced = [
        name or "the model itself"
        for name, m in model.named_modules()
        if _MARK not in m.__dict__ and any(True for _ in m.parameters(recurse=False))
    ]
    if unplaced:
        yield (
            f"device_guard: not placed on any stage: {', '.join(unplaced[:5])}{' ...' if len(unplaced) > 5 else ''}. "
            "Construct every layer with parameters inside fleet.device_guard"
        )
    if missing := sorted(set(range(stages[-1])) - set(stages)):
        yield (
            f"device_guard placed layers on stages {', '.join(map(str, stages))}, but none on "
            f"{', '.join(map(str, missing))}: number the stages from 0 without a gap"
        )
