"""What the user's optimizer was before a strategy changed it, so that `fleet.release` can give it back."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

_MISSING = object()


class PlainOptimizer:
    """Remembers class, attributes and group options; `changed` notes which of them a strategy changed."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self._before = self._options()

    def _options(self) -> list[dict[str, Any]]:
        """The attributes of the optimizer, its defaults, and each of its groups."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        return [dict(vars(self._optimizer)), dict(self._optimizer.defaults), *groups]

    def changed(self) -> None:
        """Call when the strategy has made its changes: what the user changes later stays."""
        self._changes = [
            {k: old.get(k, _MISSING) for k in {*old, *new} if old.get(k, _MISSING) is not new.get(k, _MISSING)}
            for old, new in zip(self._before, self._options(), strict=True)
        ]
        self._before = []

    def restore(self) -> None:
        self._optimizer.__class__ = self._kind
        places = [vars(self._optimizer), self._optimizer.defaults, *self._optimizer.param_groups]
        for place, changes in zip(places, self._changes, strict=False):  # groups may have been added since
            for key, value in changes.items():
                if value is _MISSING:
                    place.pop(key, None)
                else:
                    place[key] = value
