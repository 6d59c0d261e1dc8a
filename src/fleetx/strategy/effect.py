"""How to observe that a part acts.

Correct results do not show it: a strategy that saves memory or traffic gives the same numbers if it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Effect:
    """A quantity of a training run that the part changes.

    `acts` compares a run with the part to the same run without it, over the steps from the third on and over each half
    of them. `fleetx.verify.observe` counts these quantities in each step of each rank, and `fleetx.verify.judge` adds
    them up, unless noted otherwise:

        calls            calls of modules that have parameters and no children, recomputation included
        half_outputs     those among them that return float16 or bfloat16
        gradient_norm    norm of the gradients, read when the optimizer's own step begins: after all acts at GRADIENT,
                         and 0 in a step without an update
        bytes_sent       bytes that the rank sends
        most_bytes_sent  the same for the rank that sends the most
        updates          1 if the parameters changed in the step
        distance         how far the parameters moved in the step
        bytes_held       bytes of the parameters that the rank holds: the mean over the steps and ranks
        ranks_apart      1 if ranks that should hold the same parameters differ after the step
        behind           distance between the parameters and their moving average
        measured         measurements of the gradient noise scale
    """

    quantity: str
    acts: Callable[[float, float], bool]
    sentence: str  # what is observed, such as "sends fewer bytes"
    replicas: int = 1  # with fewer replicas there is nothing to observe
    acts_in_part: Callable[[float, float], bool] | None = None  # replaces `acts` if `in_part`; None: the same

    def seen(self, on: float, off: float, *, in_part: bool) -> bool:
        """Does the part act? in_part: it affects only some of what is counted."""
        return (self.acts_in_part or self.acts)(on, off) if in_part else self.acts(on, off)


def less(quantity: str, sentence: str, *, than: float = 1.0, in_part: float | None = None) -> Effect:
    """The quantity falls below `than` times its value without the part.

    in_part: the factor for a part that acts only between groups of ranks (shards, or a host), whose ranks also send to
    each other.
    """

    def below(limit: float) -> Callable[[float, float], bool]:
        return lambda on, off: on < limit * off

    return Effect(quantity, below(than), sentence, acts_in_part=None if in_part is None else below(in_part))


def more(quantity: str, sentence: str, *, by: float = 0.0, replicas: int = 1) -> Effect:
    """The quantity rises by more than `by`."""
    return Effect(quantity, lambda on, off: on > off + by, sentence, replicas)


def differs(quantity: str, sentence: str, *, by: float = 1e-3) -> Effect:
    """The quantity changes by more than the fraction `by`."""
    return Effect(quantity, lambda on, off: abs(on - off) > by * abs(off), sentence)
