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
    acts_in_part: Callable[[float, float], bool] | None = None  # what is seen then; None: the same

    def seen(self, on: float, off: float, *, in_part: bool) -> bool:
        """Does the part act? in_part: only on some of what is counted."""
        return (self.acts_in_part or self.acts)(on, off) if in_part else self.acts(on, off)


def less(quantity: str, sentence: str, *, than: float = 1.0, in_part: float | None = None) -> Effect:
    """The quantity falls below this share of what it is without the part.

    in_part: the same for a part that only acts between groups of ranks, where the ranks of a group (shards, or a host)
    also send to each other.
    """

    def below(limit: float) -> Callable[[float, float], bool]:
        return lambda on, off: on < limit * off

    return Effect(quantity, below(than), sentence, acts_in_part=None if in_part is None else below(in_part))


def more(quantity: str, sentence: str, *, by: float = 0.0, replicas: int = 1) -> Effect:
    """The quantity rises by more than this."""
    return Effect(quantity, lambda on, off: on > off + by, sentence, replicas)


def differs(quantity: str, sentence: str, *, by: float = 1e-3) -> Effect:
    """The quantity changes by more than this share."""
    return Effect(quantity, lambda on, off: abs(on - off) > by * abs(off), sentence)
