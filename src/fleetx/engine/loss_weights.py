"""`fleet.weight`: how many items (tokens, samples) the loss of a step is a mean over.

    gradient of a round = sum(n * g) / sum(n)        over its steps, and over the ranks unless each updates alone

n * g enters the model as (n / c) * g, where the loss scale enters too. c is of the size of n, because n itself would
overflow float16; and equal on all ranks, because SyncBatchNorm mixes their gradients on the way.

    one step in a round     c = sum(n) / ranks, so that the mean over the ranks is what is wanted
    merged steps            c = a power of two near the n of the round before, which costs no digit; the sum of the
                            steps is divided by sum(n) / (c * ranks) instead of their number

The ranks talk once to learn whether all of them use weights, before anything else travels; and where they do, once a
round to learn sum(n), when the backward begins whose gradients are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fleetx.comm.world import World, listed
from fleetx.errors import UsageError
from fleetx.strategy.compose import Plan
from fleetx.strategy.stage import Fact, Stage


class LossWeights:
    """What was given, and what follows from it. The first step decides whether there are weights at all."""

    def __init__(self, plan: Plan, world: World):
        self._world = world
        self._averages = any(Fact.SUMMED in act.claim.ends for act in plan.acts)  # are there merged steps to average?
        self._sums = bool(plan.at(Stage.GATE)) and not self._averages
        alone = any(Fact.LOCAL in act.claim.makes for act in plan.acts)
        self._ranks = 1 if alone else world.size  # over which sum(n) goes
        self.used: bool | None = None  # None: no step has said so yet
        self._agreed = self._ranks == 1
        self._own = 0.0  # n of the earlier steps of this round, on this rank
        self._unit = 0.0  # c
        self._given: float | None = None  # n of the step that is under way
        self._begun = False  # has its backward begun?
        self._total = 0.0  # sum(n), once it is known

    def give(self, n: Any) -> None:
        """Before the backward of a step."""
        number = _checked(n)
        if self._sums:
            raise UsageError(
                "fleet.weight makes a mean, and gradient_merge_configs['avg'] = False asks for the sum: set avg=True, "
                "or leave fleet.weight out and let the loss be a sum"
            )
        if self._begun:
            raise UsageError("fleet.weight came after backward(): call it before, and optimizer.step() after")
        if self._given is not None:
            raise UsageError("fleet.weight was called twice before one backward: call it once in each step")
        if self.used is False:
            raise UsageError("fleet.weight was not called in the steps before: call it in every step or in none")
        if number == 0 and self._ranks == 1 and not self._averages:
            raise UsageError(_EMPTY)
        self.used, self._given = True, number

    # --- while a backward runs --------------------------------------------------------------------
    def begin(self, *, opens: bool) -> None:
        """Of the backwards of a step the first counts. `opens`: it is the last step of its round, and is reduced."""
        if self._begun:
            return
        if self.used and self._given is None:
            raise UsageError(
                "fleet.weight was called in earlier steps and not in this one: call it in every step or in none"
            )
        self.used, self._begun = bool(self.used), True
        if self.used or opens:
            self._agree()
        if self._given and not self._unit:
            self._unit = _power_of_two(self._given)
        if self.used and opens:
            self._sum_up()

    def collect(self) -> None:
        """What earlier steps left is going to be reduced without a backward."""
        self._agree()
        if self.used:
            self._sum_up()

    @property
    def factor(self) -> float:
        """By what the gradient of this step is multiplied; 1 in a backward that trains nothing."""
        if not self._begun or self._given is None:
            return 1.0
        return self._given / self._unit if self._given else 0.0

    @property
    def given(self) -> float | None:
        """n of the step that is under way."""
        return self._given

    @property
    def empty(self) -> bool:
        """Does this step count for nothing? The mean over no items is nan, and would stay so if multiplied by 0."""
        return self._begun and self._given == 0

    def divisor(self, steps: int) -> float:
        """What makes a mean of the sum over so many steps."""
        if not self._averages:
            return 1.0
        return self._total / (self._unit * self._ranks) if self.used else float(steps)

    @property
    def _mine(self) -> float:
        """n of this rank in this round so far."""
        return self._own + (self._given if self._begun and self._given else 0.0)

    def _agree(self) -> None:
        """Once: the ranks that use weights are here before their first backward, the others before they communicate."""
        if self._agreed:
            return
        self.used, given = _agreed(self.used, self._given or 0.0, self._world)
        self._agreed = self.used is not None
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
        """A weight without a backward is of a batch that was left out."""
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
        """`inside` of a window what its first steps did is binding; a training resumed elsewhere may change."""
        self._own, self._unit = (saved["own"], saved["unit"]) if saved else (0.0, self._unit)
        self._given, self._begun, self._total = None, False, 0.0
        if inside:
            self.used = saved is not None


_EMPTY = "the weights of this round add up to 0, which has no mean: leave such batches out before their backward()"


def _agreed(used: bool | None, n: float, world: World) -> tuple[bool | None, list[float]]:
    """Do all ranks use `fleet.weight`, or none? None: no rank knows yet. Also the weights that are not 0."""
    known = -1.0 if used is None else float(used)
    answers = world.gather(torch.tensor([known, n], dtype=torch.float64, device=world.device)).tolist()
    using = [rank for rank, (yes, _) in enumerate(answers) if yes == 1]
    others = [rank for rank, (yes, _) in enumerate(answers) if yes == 0]
    if using and others:
        raise UsageError(
            f"fleet.weight was called on {listed(using)} but not on {listed(others)}: call it on every rank or on none"
        )
    return bool(using) if using or others else None, [given for _, given in answers if given]


def _checked(n: Any) -> float:
    try:
        number = float(n) if hasattr(n, "__float__") else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several numbers
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(
            f"fleet.weight({n!r}): give the number of items that the loss is a mean over, finite and not below 0"
        )
    return number


def _power_of_two(number: float) -> float:
    """The next one above, so that most weights are divided to less than 1."""
    return 2.0 ** math.ceil(math.log2(number))
