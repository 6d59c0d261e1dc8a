"""Learning rates for large batches: scaled by the batch size, warmed up, decayed. Formulas: `docs/schedule.md`.

    scheduler = schedule.large_batch(optimizer, updates=2512, warmup=720, batch=32768, base_batch=256, scaling="linear")
    for x, y in loader:
        ...
        optimizer.step()
        scheduler.step()

The result is an ordinary torch LRScheduler. Its rate depends only on the number of updates so far, so a resumed run
gets the same rates, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fleetx.base.suggest import did_you_mean
from fleetx.base.user_line import warn
from fleetx.comm.session import current
from fleetx.errors import StrategyError

__all__ = ["large_batch", "linear_scaling", "linear_warmup_decay", "noise_scaling", "sqrt_scaling"]

Decay = Literal["polynomial", "linear", "cosine", "none"]
Scaling = Literal["linear", "sqrt", "noise"]
By = Literal["steps", "updates", "samples"]


# --- scaling by the batch size --------------------------------------------------------------------
def linear_scaling(lr: float, batch: float, base_batch: float) -> float:
    """lr * batch / base_batch: for SGD, as long as the batch is not very large."""
    return lr * batch_ratio("linear", batch, base_batch)


def sqrt_scaling(lr: float, batch: float, base_batch: float) -> float:
    """lr * sqrt(batch / base_batch): for Adam and LAMB, or if linear scaling diverges."""
    return lr * batch_ratio("sqrt", batch, base_batch)


def noise_scaling(lr: float, batch: float, base_batch: float, noise: float) -> float:
    """lr * (1 + noise / base_batch) / (1 + noise / batch): AdaScale's gain. noise: the gradient noise scale.

    Nearly linear while both batches are small against the noise scale; nearly constant once both are large.
    """
    return lr * batch_ratio("noise", batch, base_batch, noise)


def batch_ratio(
    scaling: str | None, batch: float | None, base_batch: float | None, noise: float | None = None
) -> float:
    """The factor by which the rate grows. Divides the batches first: exact if one is a multiple of the other."""
    if scaling is None and batch is None and base_batch is None and noise is None:
        return 1.0
    problems = []
    if scaling is None:
        problems.append("batch and base_batch need a scaling rule: add scaling='linear' or scaling='sqrt'")
    else:
        problems += _unknown("scaling", scaling, get_args(Scaling))
    for name, value in (("batch", batch), ("base_batch", base_batch)):
        if value is None:
            problems.append(f"{name} is missing: scaling needs the batch of this run and the base_batch of lr")
        elif not _is_real(value) or value <= 0:
            problems.append(f"{name} = {value!r}: must be a number of samples above 0")
    if scaling == "noise" and (noise is None or not _is_real(noise) or noise < 0):
        problems.append(f"noise = {noise!r}: scaling='noise' needs the noise scale, a number of samples of at least 0")
    elif scaling != "noise" and noise is not None:
        problems.append("noise has no effect without scaling='noise': remove it or change the rule")
    if problems or batch is None or base_batch is None:
        raise StrategyError(problems)
    if scaling == "noise" and noise is not None:
        return (1 + noise / base_batch) / (1 + noise / batch)
    quotient = batch / base_batch
    return math.sqrt(quotient) if scaling == "sqrt" else quotient


# --- curves: from the number of updates so far to a fraction of the peak rate ------------------------
@dataclass(frozen=True)
class _WarmupDecay:
    updates: int
    warmup: int
    decay: str
    power: float
    end: float

    def __call__(self, t: int, step: int = 1) -> float:
        """step: what the next update adds to t."""
        if t < self.warmup:
            return min((t + step) / self.warmup, 1.0)  # t / warmup would waste an update at rate 0
        if self.decay == "none":
            return 1.0
        if t >= self.updates:
            return self.end
        progress = (t - self.warmup) / (self.updates - self.warmup)
        if self.decay == "cosine":
            factor = math.cos(math.pi / 2 * progress) ** 2  # (1 + cos(pi * progress)) / 2 without its cancellation
        else:
            factor = (1 - progress) ** self.power
        return self.end + (1 - self.end) * factor


@dataclass(frozen=True)
class _LegacyWarmupDecay:
    """The original FleetX's curve: its first update is at rate 0, and the rate drops when the warm-up ends."""

    warmup_steps: int
    num_train_steps: int

    def __call__(self, t: int, step: int = 1) -> float:
        if t < self.warmup_steps:
            return t / self.warmup_steps
        return 1 - min(t, self.num_train_steps) / self.num_train_steps


_OWN = ("_curve", "_ratio", "_by", "_counts", "_step_samples")  # not saved: a resumed run uses its own


# --- the scheduler --------------------------------------------------------------------------------
class _Schedule(LRScheduler):
    """rate = rate of the group * ratio of the batches * curve(updates or samples so far)."""

    def __init__(self, optimizer: Optimizer, curve: Any, ratio: float = 1.0, by: str = "steps", step_samples: int = 1):
        self._curve, self._ratio, self._by, self._counts, self._step_samples = curve, ratio, by, by, step_samples
        self.samples = 0  # so far, if samples are counted
        super().__init__(optimizer)

    def _initial_step(self) -> None:
        """The step that torch takes on construction, and again in SequentialLR, without an update before it."""
        by, self._by = self._by, "steps"
        super()._initial_step()
        self._by = by

    def step(self, epoch: int | None = None) -> None:
        if self._by == "samples":
            self.samples += self._step_samples
        if self._by != "updates" or epoch is not None or current().updated(self.optimizer):
            super().step(epoch)

    def get_lr(self) -> list[float | Tensor]:
        by_samples = self._counts == "samples"
        factor = self._curve(self.samples if by_samples else self.last_epoch, self._step_samples)
        return [base * self._ratio * factor for base in self.base_lrs]

    @property
    def _settings(self) -> dict[str, Any]:
        return asdict(self._curve) | {"ratio": self._ratio, "by": self._by}

    def state_dict(self) -> dict[str, Any]:
        """Contains only numbers and strings, so `torch.load(weights_only=True)` can read it."""
        state = {k: v for k, v in super().state_dict().items() if k not in _OWN}
        return state | {"settings": self._settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from the saved update with the settings of this scheduler, and set the optimizer's rates.

        torch leaves the rates to `optimizer.load_state_dict`, but a scheduler that is created later overwrites them.
        """
        state = dict(state_dict)
        saved = state.pop("settings", None)
        if saved is None:
            raise StrategyError("this state was saved by a scheduler that is not from fleetx.schedule")
        if len(state["base_lrs"]) != len(self.optimizer.param_groups):
            groups = f"{len(state['base_lrs'])} parameter groups, but this one has {len(self.optimizer.param_groups)}"
            raise StrategyError(f"this state was saved for an optimizer with {groups}")
        here = self._settings
        if changed := [f"{k}={here.get(k)!r} (saved: {saved.get(k)!r})" for k in here if here[k] != saved.get(k)]:
            warn(f"the schedule resumes with changed settings: {', '.join(changed)}")
        super().load_state_dict(state)
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            _set_rate(group, rate)


def _set_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(float(rate))  # in place, because a captured or compiled step reads this tensor
    else:
        group["lr"] = rate


# --- public functions -----------------------------------------------------------------------------
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
    noise: float | None = None,
    by: By = "steps",
    step_samples: int | None = None,
) -> LRScheduler:
    """Scale the rate of each group by the batch size, warm it up to that peak, and decay it until `updates`.

    updates             number of updates in the run; after them the rate stays constant
    warmup              number of warm-up updates (int), or their fraction of all updates (float below 1)
    decay, power        "polynomial": (1 - s) ** power, 2 by default; "linear": power 1; "cosine"; "none"
    end                 final rate as a fraction of the peak
    batch, base_batch   samples per update, over all ranks and merged steps; and the batch size that lr was chosen for
    scaling             "linear", "sqrt", or "noise" with the noise scale in `noise`
    by                  "steps": count every scheduler.step(). "updates": count only those after an optimizer.step()
                        that applied an update, so merged and overflowed steps do not change the rate. "samples":
                        count step_samples in every scheduler.step(); updates and warmup are then samples too
    step_samples        samples per step, over all ranks
    """
    problems = _bad_count("updates", updates, least=1)
    problems += _bad_warmup(warmup, None if problems else updates)
    problems += _unknown("decay", decay, get_args(Decay)) + _unknown("by", by, get_args(By))
    if power is not None and decay != "polynomial":
        problems.append(f"power has no effect with decay={decay!r}: remove it or use decay='polynomial'")
    elif power is not None and (not _is_real(power) or power <= 0):
        problems.append(f"power = {power!r}: must be a number above 0")
    if not _is_real(end) or not 0 <= end <= 1:
        problems.append(f"end = {end!r}: must be a fraction of the peak rate, from 0 to 1")
    elif end and decay == "none":
        problems.append("end has no effect with decay='none': remove it or choose a decay")
    if by == "samples":
        problems += _bad_count("step_samples", step_samples, least=1)
    elif step_samples is not None:
        problems.append(f"step_samples has no effect with by={by!r}: remove it or use by='samples'")
    try:
        ratio = batch_ratio(scaling, batch, base_batch, noise)
    except StrategyError as error:
        problems += error.problems
    if problems:
        raise StrategyError(problems)
    first = round(warmup * updates) if isinstance(warmup, float) else int(warmup)
    exponent = 1.0 if decay == "linear" else 2.0 if power is None else float(power)
    curve = _WarmupDecay(int(updates), first, decay, exponent, float(end))
    return _Schedule(optimizer, curve, ratio, by, int(step_samples or 1))


def linear_warmup_decay(learning_rate: float, warmup_steps: int, num_train_steps: int) -> UnboundSchedule:
    """The original FleetX's X.utils.linear_warmup_decay: from 0 to the rate, then 1 - t / num_train_steps of it, to 0.

    There it was a variable of the program. Here, call the result with a number of updates, or bind it to an optimizer.
    Prefer `large_batch` for new recipes: it neither wastes the first update nor drops after the warm-up.
    """
    problems = _bad_count("warmup_steps", warmup_steps, least=0)
    problems += _bad_count("num_train_steps", num_train_steps, least=1)
    if not _is_real(learning_rate) or learning_rate < 0:
        problems.append(f"learning_rate = {learning_rate!r}: must be a number, at least 0")
    if not problems and warmup_steps > num_train_steps:
        problems.append(f"warmup_steps = {warmup_steps}: must be at most num_train_steps = {num_train_steps}")
    if problems:
        raise StrategyError(problems)
    return UnboundSchedule(float(learning_rate), _LegacyWarmupDecay(int(warmup_steps), int(num_train_steps)))


@dataclass(frozen=True)
class UnboundSchedule:
    """A schedule without an optimizer."""

    peak: float
    curve: Any
    name: str = "scheduled_learning_rate"  # of the variable in FleetX

    def __call__(self, t: int) -> float:
        """The rate after t updates."""
        return self.peak * self.curve(t)

    def bind(self, optimizer: Optimizer, *, by: By = "steps") -> LRScheduler:
        """Return an ordinary scheduler, which replaces the optimizer's own rate with this one."""
        problems = _unknown("by", by, ("steps", "updates"))
        if len({float(group["lr"]) for group in optimizer.param_groups}) > 1:
            problems.append("the parameter groups have different rates, but this schedule sets one rate for all")
        if problems:
            raise StrategyError(problems)
        for group in optimizer.param_groups:
            _set_rate(group, self.peak)
            group.pop("initial_lr", None)  # from an earlier scheduler: torch would take it for the peak
        return _Schedule(optimizer, self.curve, by=by)


# --- checks of arguments --------------------------------------------------------------------------
def _unknown(name: str, value: Any, known: Sequence[str]) -> list[str]:
    if value in known:
        return []
    hint = did_you_mean(value, known, otherwise=f"must be one of {', '.join(map(repr, known))}", cutoff=0.5)
    return [f"{name} = {value!r}: {hint}"]


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _bad_count(name: str, value: Any, *, least: int) -> list[str]:
    fine = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
    return [] if fine else [f"{name} = {value!r}: must be an integer, at least {least}"]


def _bad_warmup(warmup: Any, updates: int | None) -> list[str]:
    """`updates` is None if it is itself invalid."""
    if isinstance(warmup, float):
        hint = "a float is a fraction of all updates, at least 0 and below 1; pass an int for a number of updates"
        return [] if 0 <= warmup < 1 else [f"warmup = {warmup!r}: {hint}"]
    problems = _bad_count("warmup", warmup, least=0)
    if not problems and updates is not None and warmup > updates:
        problems.append(f"warmup = {warmup}: must be at most updates = {updates}")
    return problems
