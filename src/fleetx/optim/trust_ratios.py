"""The trust ratios of LARS and LAMB: by how much each tensor's rate differs from the rate of its group."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fleetx.optim.dispatch import KernelCall
from fleetx.optim.foreach import AllSum
from fleetx.optim.lamb import Lamb
from fleetx.optim.lars import Lars
from fleetx.optim.layerwise import RatioFormula


@dataclass(frozen=True)
class _Norms:
    """The norms of one kernel call. They stay on the device until they are read."""

    params: list[Tensor]
    squares: Tensor  # (n, 2)
    decays: list[float]
    adapted: list[bool]
    formula: RatioFormula


class TrustRatios:
    """Records the ratios of the last update of a `Lars` or `Lamb`, until `close`. Print it for a histogram.

    Costs a copy of two numbers per tensor and update, and on a CPU separate passes for norms and update, which may
    change the last bit of LAMB's results.
    """

    def __init__(self, optimizer: Any, names: Mapping[Any, str] | None = None):
        if not isinstance(optimizer, Lars | Lamb):
            raise TypeError(f"only Lars and Lamb have trust ratios, not {type(optimizer).__name__}")
        self._optimizer, self._names = optimizer, names or _names(optimizer)
        self._norms: list[_Norms] = []
        optimizer.recorder = self

    def begin(self) -> None:
        """A new update begins."""
        self._norms = []

    def noting(
        self, call: KernelCall, params: list[Tensor], decays: list[float], adapted: list[bool], formula: RatioFormula
    ) -> AllSum:
        """What the kernel calls with its squared norms."""

        def note(squares: Tensor) -> None:
            if call.reduce is not None:
                call.reduce(squares)
            norms = _Norms(call.pick(params), squares.clone(), call.pick(decays), call.pick(adapted), formula)
            self._norms.append(norms)

        return note

    def values(self) -> dict[str, float]:
        """The ratio of each tensor that was adapted in the last update, by name. Waits for the device."""
        found = {}
        for norms in self._norms:
            rows = norms.squares.sqrt().tolist()
            for p, (a, b), decay, adapted in zip(norms.params, rows, norms.decays, norms.adapted, strict=True):
                if adapted and a > 0 and b > 0:
                    found[self._names.get(p, "?")] = norms.formula(a, b, decay)
        return found

    def histogram(self) -> list[tuple[float, float, int]]:
        """(from, to, number of tensors) for powers of two, without empty bins at either end."""
        counts = Counter(math.floor(math.log2(r)) for r in self.values().values() if r > 0)
        return [(2.0**i, 2.0 ** (i + 1), counts[i]) for i in range(min(counts), max(counts) + 1)] if counts else []

    def __str__(self) -> str:
        rows = [f"{low:10.3g} to {high:<10.3g} {'#' * min(n, 60)} {n}".rstrip() for low, high, n in self.histogram()]
        return "\n".join(["trust ratios of the last update", *(rows or ["no tensor was adapted yet"])])

    def close(self) -> None:
        if self._optimizer.recorder is self:
            del self._optimizer.recorder

    def __enter__(self) -> TrustRatios:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _names(optimizer: Any) -> dict[Any, str]:
    """The names that the optimizer knows, or numbers."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    return dict(zip(params, names if len(names) == len(params) else map(str, range(len(params))), strict=True))
