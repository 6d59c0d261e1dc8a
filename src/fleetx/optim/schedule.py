"""The learning rate for large batches: scaled by the batch, warmed up, decayed. `docs/schedule.md` has the formulas.

    scheduler = schedule.large_batch(optimizer, updates=2512, warmup=720, batch=32768, base_batch=256, scaling="linear")
    for x, y in loader:
        ...
        optimizer.step()
        scheduler.step()

The result is an ordinary torch LRScheduler. Its rate depends on nothing but the number of updates before it, so a run
that is resumed at any of them goes on with the same rates, bit for bit.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fleetx.comm.session import current
from fleetx.errors import StrategyError

__all__ = ["large_batch", "linear_scaling", "linear_warmup_decay", "sqrt_scaling"]

Decay = Literal["polynomial", "linear", "cosine", "none"]
Scaling = Literal["linear", "sqrt"]
By = Literal["steps", "updates"]

_DECAYS = ("polynomial", "linear", "cosine", "none")
_SCALINGS = ("linear", "sqrt")
_BY = ("steps", "updates")


# --- the batch ------------------------------------------------------------------------------------
def linear_scaling(lr: float, batch: float, base_batch: float) -> float:
    """lr * batch / base_batch: what SGD and its kin take, as long as the batch is not very large."""
    return lr * _ratio("linear", batch, base_batch)


def sqrt_scaling(lr: float, batch: float, base_batch: float) -> float:
    """lr * sqrt(batch / base_batch): for Adam and LAMB, and where linear scaling diverges."""
    return lr * _ratio("sqrt", batch, base_batch)


def _ratio(scaling: str | None, batch: float | None, base_batch: float | None) -> float:
    """By what the rate grows. First the quotient of the batches: it is exact where one divides the other."""
    if scaling is None and batch is None and base_batch is None:
        return 1.0
    problems = []
    if scaling is None:
        problems.append("batch or base_batch is given without a rule: add scaling='linear' or scaling='sqrt'")
    else:
        problems += _unknown("scaling", scaling, _SCALINGS)
    for name, value in (("batch", batch), ("base_batch", base_batch)):
        if value is None:
            problems.append(f"{name} is missing: scaling needs the batch of this run and the one that lr is meant for")
        elif not _is_real(value) or value <= 0:
            problems.append(f"{name} = {value!r}: must be a number of samples above 0")
    if problems or batch is None or base_batch is None:
        raise StrategyError(problems)
    quotient = batch / base_batch
    return math.sqrt(quotient) if scaling == "sqrt" else quotient


# --- the laws: from the number of updates so far to a share of the peak ------------------------------
@dataclass(frozen=True)
class _WarmupDecay:
    updates: int
    warmup: int
    decay: str
    power: float
    end: float

    def __call__(self, t: int) -> float:
        if t < self.warmup:
            return (t + 1) / self.warmup  # not t / warmup: an update at rate 0 is wasted
        if self.decay == "none":
            return 1.0
        if t >= self.updates:
            return self.end
        gone = (t - self.warmup) / (self.updates - self.warmup)
        if self.decay == "cosine":
            left = math.cos(math.pi / 2 * gone) ** 2  # (1 + cos(pi * gone)) / 2, which cancels out near the end
        else:
            left = (1 - gone) ** self.power
        return self.end + (1 - self.end) * left


@dataclass(frozen=True)
class _OldWarmupDecay:
    """As the old system had it, with its first update at rate 0 and its fall by warmup / steps after the warm-up."""

    warmup_steps: int
    num_train_steps: int

    def __call__(self, t: int) -> float:
        if t < self.warmup_steps:
            return t / self.warmup_steps
        return 1 - min(t, self.num_train_steps) / self.num_train_steps


# --- the scheduler --------------------------------------------------------------------------------
class _Schedule(LRScheduler):
    """rate = rate of the group * ratio of the batches * law(updates so far)."""

    def __init__(self, optimizer: Optimizer, law: Any, ratio: float = 1.0, by: str = "steps"):
        self._law, self._ratio, self._by = law, ratio, by
        super().__init__(optimizer)

    def _initial_step(self) -> None:
        """torch's own first step, which follows no update: when this is made, and once more inside of SequentialLR."""
        by, self._by = self._by, "steps"
        super()._initial_step()
        self._by = by

    def step(self, epoch: int | None = None) -> None:
        if self._by == "steps" or epoch is not None or _applied(self.optimizer):
            super().step(epoch)

    def get_lr(self) -> list[float | Tensor]:
        share = self._law(self.last_epoch)
        return [base * self._ratio * share for base in self.base_lrs]

    @property
    def _settings(self) -> dict[str, Any]:
        return asdict(self._law) | {"ratio": self._ratio, "by": self._by}

    def state_dict(self) -> dict[str, Any]:
        """Numbers and strings only, so that `torch.load(weights_only=True)` reads it."""
        state = {k: v for k, v in super().state_dict().items() if k not in ("_law", "_ratio", "_by")}
        return state | {"settings": self._settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the saved update, with the law given here; and give the optimizer its rate at once.

        torch leaves that to `optimizer.load_state_dict`, whose work is lost if the scheduler is made after it.
        """
        state = dict(state_dict)
        saved = state.pop("settings", None)
        if saved is None:
            raise StrategyError("this state was saved by another scheduler, not by one of fleetx.schedule")
        if len(state["base_lrs"]) != len(self.optimizer.param_groups):
            groups = f"{len(state['base_lrs'])} groups of parameters, this one has {len(self.optimizer.param_groups)}"
            raise StrategyError(f"this state was saved for an optimizer with {groups}")
        here = self._settings
        if changed := [f"{k}={here.get(k)!r} (saved: {saved.get(k)!r})" for k in here if here[k] != saved.get(k)]:
            warnings.warn(f"the schedule goes on with what is given here: {', '.join(changed)}", stacklevel=2)
        super().load_state_dict(state)
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            _set_rate(group, rate)


def _applied(optimizer: Optimizer) -> bool:
    """Did the last step() of this optimizer apply an update?"""
    return current().updated(optimizer)


def _set_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(float(rate))  # in place: a captured or compiled step reads this very tensor
    else:
        group["lr"] = rate


# --- what a user calls ----------------------------------------------------------------------------
def large_batch(
    optimizer: Optimizer,
    *,
    updates: int,
    warmup: int | float = 0,
    decay: Decay = "polynomial",
    power: float | None = None,
    end: float = 0.0,
    batch: float | None = None,
    base_batch: float | None = None,
    scaling: Scaling | None = None,
    by: By = "steps",
) -> LRScheduler:
    """Scale the rate of each group by the batch, warm it up to that peak, let it decay until `updates`.

    updates             in the whole run; after them the rate stays where it ended
    warmup              updates of the warm-up, as an int; or their share of all, as a float below 1
    decay, power        "polynomial": (1 - s) ** power, 2 by default; "linear": power 1; "cosine"; "none"
    end                 the share of the peak that is left at the end
    batch, base_batch   samples in one update (over all ranks and merged steps); and those for which the lr is meant
    scaling             "linear" or "sqrt"
    by                  "steps": every scheduler.step() is one update. "updates": only those are that follow an
                        optimizer.step() which applied one; a merged or overflowed step does not move the rate
    """
    problems = _not_counted("updates", updates, least=1)
    problems += _bad_warmup(warmup, None if problems else updates)
    problems += _unknown("decay", decay, _DECAYS) + _unknown("by", by, _BY)
    if power is not None and decay != "polynomial":
        problems.append(f"power is given, but decay={decay!r} has none: remove it or use decay='polynomial'")
    elif power is not None and (not _is_real(power) or power <= 0):
        problems.append(f"power = {power!r}: must be a number above 0")
    if not _is_real(end) or not 0 <= end <= 1:
        problems.append(f"end = {end!r}: must be a share of the peak, from 0 to 1; divide a rate by the peak rate")
    elif end and decay == "none":
        problems.append("end is given, but decay='none' does not go there: remove it or choose a decay")
    try:
        ratio = _ratio(scaling, batch, base_batch)
    except StrategyError as error:
        problems += error.problems
    if problems:
        raise StrategyError(problems)
    first = round(warmup * updates) if isinstance(warmup, float) else int(warmup)
    exponent = 1.0 if decay == "linear" else 2.0 if power is None else float(power)
    return _Schedule(optimizer, _WarmupDecay(int(updates), first, decay, exponent, float(end)), ratio, by)


def linear_warmup_decay(learning_rate: float, warmup_steps: int, num_train_steps: int) -> BoundLater:
    """The old X.utils.linear_warmup_decay: from 0 up to the rate, then 1 - t / num_train_steps of it, down to 0.

    There it was a variable of the program. Here it is the law itself: call it with a number of updates, or bind it to
    an optimizer. For a new recipe `large_batch` is better, which neither wastes the first update nor jumps.
    """
    problems = _not_counted("warmup_steps", warmup_steps, least=0)
    problems += _not_counted("num_train_steps", num_train_steps, least=1)
    if not _is_real(learning_rate) or learning_rate < 0:
        problems.append(f"learning_rate = {learning_rate!r}: must be a number, 0 or above")
    if not problems and warmup_steps > num_train_steps:
        problems.append(f"warmup_steps = {warmup_steps} is more than num_train_steps = {num_train_steps}")
    if problems:
        raise StrategyError(problems)
    return BoundLater(float(learning_rate), _OldWarmupDecay(int(warmup_steps), int(num_train_steps)))


@dataclass(frozen=True)
class BoundLater:
    """A rate over time that needs no optimizer yet."""

    peak: float
    law: Any

    def __call__(self, t: int) -> float:
        """The rate of the update that has t updates before it."""
        return self.peak * self.law(t)

    def bind(self, optimizer: Optimizer, *, by: By = "steps") -> LRScheduler:
        """An ordinary scheduler that gives the optimizer this rate, in the place of the rate that it was made with."""
        problems = _unknown("by", by, _BY)
        if len({float(group["lr"]) for group in optimizer.param_groups}) > 1:
            problems.append("the groups of this optimizer have different rates, and this law is one rate for all")
        if problems:
            raise StrategyError(problems)
        for group in optimizer.param_groups:
            _set_rate(group, self.peak)
            group.pop("initial_lr", None)  # of a scheduler before this one; torch would take it for the peak
        return _Schedule(optimizer, self.law, by=by)


# --- what is refused ------------------------------------------------------------------------------
def _unknown(name: str, value: Any, known: Sequence[str]) -> list[str]:
    if value in known:
        return []
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"must be one of {', '.join(map(repr, known))}"
    return [f"{name} = {value!r}: {hint}"]


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _not_counted(name: str, value: Any, *, least: int) -> list[str]:
    fine = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
    return [] if fine else [f"{name} = {value!r}: must be a whole number, {least} or more"]


def _bad_warmup(warmup: Any, updates: int | None) -> list[str]:
    """`updates` is None where it is wrong itself."""
    if isinstance(warmup, float):
        share = "as a float it is a share of all updates, from 0 to below 1; give an int for a number of updates"
        return [] if 0 <= warmup < 1 else [f"warmup = {warmup!r}: {share}"]
    problems = _not_counted("warmup", warmup, least=0)
    if not problems and updates is not None and warmup > updates:
        problems.append(f"warmup = {warmup} is longer than all updates = {updates}: shorten it or train longer")
    return problems
