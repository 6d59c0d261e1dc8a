"""The places of a training step where a part may act, and the facts about the gradient that parts share.

The stages in the order of a step, what an act receives (its last argument is always `ctx`, see engine/context.py) and
what it returns:

    stage      called                                      value -> result
    MODEL      once, at set-up                             model -> model, same parameters under the same names
    FORWARD    each model(x)                               -> context manager; if it yields a callable, this is applied
                                                           to every output tensor
    LOSS       each backward                               -> factor for the gradient that enters the model; gradients
                                                           of the inputs are divided by it again
    GATE       each optimizer.step(): does it update?      number of steps in this window -> bool
    REDUCE     each bucket, *while backward runs*          Bucket -> Future of its reduced buffer; without an act, the
                                                           ranks exchange gradients
    WIRE       each bucket of what the ranks exchange:     Outgoing -> Future of its mean over the ranks
               gradients, or parameters (`ctx.mean`)
    GRADIENT   the gate is open, before the update         list of gradients -> None; `ctx.withhold_if` can cancel the
                                                           update
    UPDATE     once, at set-up                             optimizer -> optimizer
    PARAMETER  after each round                            list of parameters -> None
    SCHEDULE   replaces forward and backward               StepInput -> loss

The list at GRADIENT holds this rank's local part of each gradient that is not None, in the order of `param_groups`, to
be changed in place: they belong to `[p for p in ctx.params if p.grad is not None]`, and `ctx.names[p]` is a parameter's
name. The list can be empty on a rank of a divided model, and can differ between ranks with unused parameters.

Three questions, each with one answer, settle what crosses the network: *what* the ranks exchange (REDUCE), *how* it is
encoded (WIRE), and *along which path* (the Network, configured by acts at MODEL).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from fleetx.strategy.part import Part


class Stage(IntEnum):
    """A place in one training step where a part may act."""

    MODEL = 1
    FORWARD = 2
    LOSS = 3
    GATE = 4
    REDUCE = 5
    WIRE = 6
    GRADIENT = 7
    UPDATE = 8
    PARAMETER = 9
    SCHEDULE = 10

    @property
    def solo(self) -> str:
        """What only one part can do here; empty where several parts may act."""
        return _SOLO.get(self, ("", ""))[0]

    @property
    def because(self) -> str:
        """Why only one part can do it."""
        return _SOLO.get(self, ("", ""))[1]


_SOLO = {
    Stage.LOSS: ("scale the loss", "a loss has one scale"),
    Stage.GATE: ("control which steps update the parameters", "a step updates them or does not"),
    Stage.REDUCE: ("decide what the ranks exchange", "they exchange one thing"),
    Stage.WIRE: ("compress what the ranks send", "a value can be compressed only once"),
    Stage.UPDATE: ("change the optimizer's update rule", "an update follows one rule"),
    Stage.SCHEDULE: ("run forward and backward themselves", "each of them runs once"),
}


class Fact(Enum):
    """What can be true of the gradients of a step, and how a part makes it true.

    `what` completes "does not work with ..." and "needs ..."; `how` completes "does not support `x` yet, which ...".
    """

    SCALED = "gradients multiplied by a loss scale", "multiplies gradients by a loss scale"
    SUMMED = "gradients summed over merged steps without averaging", "sums gradients over merged steps"
    MOMENTUM = "gradients that already contain momentum", "adds momentum to gradients"
    RESIDUAL = "gradients of which each rank keeps part for later steps", "keeps part of each gradient for later steps"
    LOCAL = "gradients that differ between ranks", "lets gradients differ between ranks"
    APART = "parameters that ranks have not averaged yet", "lets parameters differ between ranks"
    PARTED = "parameters sharded across ranks", "shards parameters across ranks"
    STAGED = "a model split into pipeline stages", "splits the model into stages"
    TOGETHER = "a model whose modules wait for all ranks", "makes modules wait for all ranks"
    ROUTED = "gradients sent over several process groups", "sends gradients over several process groups"
    CHANGED = "gradients that are no longer the mean over the batch", "changes gradients"
    CLIPPED = "gradients whose norm was limited", "limits the norm of gradients"
    SPREAD = (
        "gradients of shared weights not yet summed over the pipeline stages",
        "divides gradients of shared weights between the pipeline stages",
    )

    def __init__(self, what: str, how: str):
        self.what, self.how = what, how


def always(part: Any) -> bool:
    """The default of `when`: the act runs whatever the settings are."""
    return True


@dataclass(frozen=True)
class Claim:
    """What a method declares about itself: its stage, and how it depends on and changes the facts."""

    stage: Stage
    needs: frozenset[Fact] = frozenset()
    bars: frozenset[Fact] = frozenset()
    because: str = ""
    unbuilt: frozenset[Fact] = frozenset()
    makes: frozenset[Fact] = frozenset()
    ends: frozenset[Fact] = frozenset()
    when: Callable[[Any], bool] = always
    replay: bool = True


@dataclass(frozen=True, eq=False)
class Act:
    """One method of one part, ready to be called at its stage."""

    part: Part
    switch: str
    call: Callable[..., Any] | None  # None: torch does it, and the part only declares it
    claim: Claim
    declared: str = ""  # what it does, where there is no call

    @property
    def stage(self) -> Stage:
        return self.claim.stage

    @property
    def name(self) -> str:
        """The switch and the method, such as `amp.unscale`."""
        return f"{self.switch}.{self.call.__name__}" if self.call is not None else self.switch

    @property
    def meaning(self) -> str:
        """The first line of the method's docstring, for `explain`."""
        return self.declared or (self.call.__doc__ or "").strip().split("\n")[0]


Method = TypeVar("Method", bound=Callable[..., Any])


def at(
    stage: Stage,
    *,
    needs: Collection[Fact] = (),
    bars: Collection[Fact] = (),
    because: str = "",
    unbuilt: Collection[Fact] = (),
    makes: Collection[Fact] = (),
    ends: Collection[Fact] = (),
    when: Callable[[Any], bool] = always,
    replay: bool = True,
) -> Callable[[Method], Method]:
    """Mark a method as an act: its stage, and the facts that it needs, bars, makes and ends.

    because: why it could never work with the facts that it bars, unless an earlier act ends them.
    unbuilt: facts that it could work with, but does not yet.
    when: a predicate on the part. If it is False, for example at the neutral setting, the act is left out of the plan.
    replay: if False, a FORWARD context is not entered again when a piece of the forward is recomputed.
    """

    def mark(method: Method) -> Method:
        claim = Claim(
            stage, frozenset(needs), frozenset(bars), because, frozenset(unbuilt), frozenset(makes), frozenset(ends),
            when, replay,
        )  # fmt: skip
        method.claim = claim  # type: ignore[attr-defined]
        return method

    return mark
