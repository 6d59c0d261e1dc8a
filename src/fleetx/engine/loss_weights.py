"""`fleet.weight`: how many items (tokens, samples) the loss of a step is averaged over.

    gradient of a round = sum(n * g) / sum(n)        over its steps, and over ranks unless each rank updates alone

n * g enters the model as (n / c) * g, at the same place as the loss scale. c is about as large as n, because n itself
would overflow float16, and equal on all ranks, because SyncBatchNorm mixes their gradients.

    one step per round      c = sum(n) / ranks, so the mean over the ranks is the weighted mean
    merged steps            c = a power of two near n of the previous round, which loses no precision; the sum of the
                            steps is divided by sum(n) / (c * ranks) instead of their number

The ranks communicate once to learn whether all of them use weights, and then once per round to learn sum(n), at the
start of the backward whose gradients are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fleetx.comm import peers
from fleetx.comm.world import World, listed
from fleetx.errors import UsageError
from fleetx.strategy.compose import Plan
from fleetx.strategy.stage import Fact, Stage


class LossWeights:
    """The weights, and what follows from them. The first step decides whether weights are used at all."""

    def __init__(self, plan: Plan, world: World, *, island: bool = False):
        """world: the replicas of the model, or of one island of them."""
        self._world = world
        self._averages = any(Fact.SUMMED in act.claim.ends for act in plan.acts)  # are merged steps averaged?
        self._sums = bool(plan.at(Stage.GATE)) and not self._averages
        self._ranks = 1 if plan.makes(Fact.LOCAL) and not island else world.size  # over which sum(n) is taken
        self.used: bool | None = None  # None: not known yet
        self._agreed = self._ranks == 1
        self._own = 0.0  # n of the earlier steps of this round, on this rank
        self._unit = 0.0  # c
        self._given: float | None = None  # n of the current step
        self._begun = False  # has its backward begun?
        self._total = 0.0  # sum(n), once it is known

    def give(self, n: Any) -> None:
        """Set n of the current step, before its backward."""
        number = _checked(n)
        if self._sums:
            raise UsageError(
                "fleet.weight makes a mean, but gradient_merge_configs['avg'] = False asks for the sum: set avg=True, "
                "or remove fleet.weight and use a loss that is a sum"
            )
        if self._begun:
            raise UsageError("fleet.weight was called after backward(): call it before backward()")
        if self._given is not None:
            raise UsageError("fleet.weight was called twice before one backward: call it once per step")
        if self.used is False:
            raise UsageError("fleet.weight was not called in earlier steps: call it in every step or in none")
        if number == 0 and self._ranks == 1 and not self._averages:
            raise UsageError(_EMPTY)
        self.used, self._given = True, number

    # --- while a backward runs --------------------------------------------------------------------
    def begin(self, *, opens: bool) -> None:
        """Only the first backward of a step counts. opens: this is the last step of its round, which is reduced."""
        if self._begun:
            return
        if self.used and self._given is None:
            raise UsageError(
                "fleet.weight was called in earlier steps but not in this one: call it in every step or in none"
            )
        self.used, self._begun = bool(self.used), True
        if self.used and not opens and not self._agreed:
            peers.announce("fleet.weight")  # a rank without weights may be in fleet.flush
        if self.used or opens:
            self._agree()
        if self._given and not self._unit:
            self._unit = _power_of_two(self._given)
        if self.used and opens:
            self._sum_up()

    def collect(self) -> None:
        """Called before earlier steps are reduced without a backward."""
        self._agree()
        if self.used:
            self._sum_up()

    @property
    def factor(self) -> float:
        """The factor of this step's gradient; 1 in a backward that does not train."""
        if not self._begun or self._given is None:
            return 1.0
        return self._given / self._unit if self._given else 0.0

    @property
    def given(self) -> float | None:
        """n of the current step."""
        return self._given

    @property
    def empty(self) -> bool:
        """Is n of this step 0? The mean over no items is nan, and stays nan if multiplied by 0."""
        return self._begun and self._given == 0

    def divisor(self, steps: int) -> float:
        """What the sum over this many steps is divided by, to get their mean."""
        if not self._averages:
            return 1.0
        return self._total / (self._unit * self._ranks) if self.used else float(steps)

    @property
    def _mine(self) -> float:
        """The sum of n on this rank in this round so far."""
        return self._own + (self._given if self._begun and self._given else 0.0)

    def _agree(self) -> None:
        """Agree once whether weights are used.

        Ranks that use weights call this before their first backward, the others before they communicate.
        """
        if self._agreed:
            return
        known = -1.0 if self.used is None else float(self.used)
        mine = torch.tensor([known, self._given or 0.0], dtype=torch.float64, device=self._world.device)
        answers = self._world.gather(mine).tolist()
        using = [rank for rank, (yes, _) in enumerate(answers) if yes == 1]
        others = [rank for rank, (yes, _) in enumerate(answers) if yes == 0]
        if using and others:
            raise UsageError(
                f"fleet.weight was called on {listed(using)} but not on {listed(others)}: call it on every rank or on "
                "none"
            )
        self._agreed = bool(using or others)  # else no rank knows yet
        self.used = bool(using) if self._agreed else None
        given = [n for _, n in answers if n]
        if self.used and not self._unit:
            self._unit = _power_of_two(sum(given) / len(given)) if given else 1.0

    def _sum_up(self) -> None:
        total = torch.tensor([self._mine], dtype=torch.float64)
        if self._ranks > 1:
            total = total.to(self._world.device)
            self._world.sum(total)
        self._total = total.item()
        if self._total == 0:
            raise UsageError(_EMPTY)
        if not self._averages:
            self._unit = self._total / self._ranks

    # --- after a step -----------------------------------------------------------------------------
    def end_step(self, *, opened: bool, steps: int) -> None:
        """A weight without a backward belongs to a skipped batch, and does not count."""
        if opened:
            if self._total:
                self._unit = _power_of_two(self._total / (self._ranks * steps))
            self._own = self._total = 0.0
        else:
            self._own = self._mine
        self._given, self._begun = None, False

    def saved(self) -> dict[str, float]:
        return {"own": self._own, "unit": self._unit}

    def load(self, saved: Mapping[str, float] | None, *, inside: bool) -> None:
        """inside: was it saved inside a merge window? Then its first steps decide whether weights are used."""
        self._own, self._unit = (saved["own"], saved["unit"]) if saved else (0.0, self._unit)
        self._given, self._begun, self._total = None, False, 0.0
        if inside:
            self.used = saved is not None


_EMPTY = "the weights of this round add up to 0, so there is no mean: skip such batches before their backward()"


def _checked(n: Any) -> float:
    try:
        number = float(n) if hasattr(n, "__float__") else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several numbers
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(
            f"fleet.weight({n!r}): pass the number of items that the loss is averaged over, finite and at least 0"
        )
    return number


def _power_of_two(number: float) -> float:
    """The next power of two above, so that most weights become less than 1."""
    return 2.0 ** math.ceil(math.log2(number))
