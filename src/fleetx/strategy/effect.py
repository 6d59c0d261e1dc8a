"""How a part is observed to act.

Results that are right do not show it: a strategy that saves memory or network and does nothing gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Effect:
    """A quantity of a training run that the part changes.

    `acts` compares the run with the part and the same run without it, in the first and in the second half of the steps
    from the third on. The quantities are those that `fleetx.verify.observe` counts per rank.
    """

    quantity: str
    acts: Callable[[float, float], bool]
    sentence: str  # what is seen, such as "sends fewer bytes"
    replicas: int = 1  # with fewer copies of the model there is nothing to see


def less(quantity: str, sentence: str, *, than: float = 1.0) -> Effect:
    """The quantity falls below this share of what it is without the part."""
    return Effect(quantity, lambda on, off: on < than * off, sentence)


def more(quantity: str, sentence: str, *, by: float = 0.0, replicas: int = 1) -> Effect:
    """The quantity rises by more than this."""
    return Effect(quantity, lambda on, off: on > off + by, sentence, replicas)


def differs(quantity: str, sentence: str, *, by: float = 1e-3) -> Effect:
    """The quantity changes by more than this share."""
    return Effect(quantity, lambda on, off: abs(on - off) > by * abs(off), sentence)
