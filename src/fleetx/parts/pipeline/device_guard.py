"""`with fleet.device_guard("stage:0"):` around the construction of layers says on which stage they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fleetx.errors import UsageError

_MARK = "_fleetx_stage"  # a plain number on the module, which copies and pickles carry along


@contextmanager
def device_guard(device: str) -> Iterator[None]:
    """Modules that are constructed inside are placed on this stage: "gpu:0", "cpu:0" and "stage:0" all mean the first.

    Which device a stage runs on is for the launcher to say: the number counts stages, as in Paddle.
    """
    found = re.fullmatch(r"(gpu|cpu|stage):(\d+)", device) if isinstance(device, str) else None
    if found is None:
        raise UsageError(f"device_guard({device!r}): write 'stage:0', 'gpu:0' or 'cpu:0', with the number of the stage")
    number = int(found[2])
    before: Any = nn.Module.__init__

    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        self.__dict__[_MARK] = number

    nn.Module.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = before  # type: ignore[method-assign]


def placed(module: nn.Module) -> int | None:
    found: int | None = module.__dict__.get(_MARK)
    return found


def placements(model: nn.Module) -> dict[str, int]:
    """By the name of the module, of all that were placed."""
    return {name: stage for name, m in model.named_modules() if (stage := placed(m)) is not None}


def problems(model: nn.Module) -> Iterator[str]:
    """What is wrong with the placement, where there is one."""
    stages = set(placements(model).values())
    if not stages:
        return
    loose = [
        name or "the model itself"
        for name, m in model.named_modules()
        if placed(m) is None and any(True for _ in m.parameters(recurse=False))
    ]
    if loose:
        yield (
            f"{', '.join(loose[:5])}{' ...' if len(loose) > 5 else ''} {'has' if len(loose) == 1 else 'have'} "
            "parameters and was never placed: construct it inside of fleet.device_guard"
        )
    if missing := sorted(set(range(max(stages))) - stages):
        yield (
            f"device_guard placed layers on stages {_list(sorted(stages))}, and none on {_list(missing)}: number the "
            f"stages from 0 without a gap"
        )


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
