"""A hook that stays with its model."""

from __future__ import annotations

from typing import Any

import torch


class Hook:
    """A copy or a pickle of the model carries one that does nothing instead: it is a plain model."""

    def __init__(self, call: Any):
        self.call = call

    @torch._disable_dynamo  # a model compiled after `distribute` must run it as it is
    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _make_nothing, ()


def _nothing(*args: Any) -> None:
    """What a copy of the model has in the place of the engine's hooks."""


def _make_nothing() -> Any:
    return _nothing
