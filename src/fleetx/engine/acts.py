"""The acts of a plan, each with its context, ready to be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fleetx.engine.context import SetupContext, StepContext
from fleetx.engine.run import key_of
from fleetx.strategy.compose import Plan
from fleetx.strategy.stage import Act, Stage

if TYPE_CHECKING:
    from fleetx.engine.windows import Windows

Calls = dict[Stage, list[tuple[Any, Any]]]  # (act, context), in order
_SETUP = (Stage.MODEL, Stage.UPDATE)


def bound(run: Windows) -> Calls:
    return {stage: [(act.call, _context(run, act)) for act in _called(run.plan, stage)] for stage in Stage}


def wrapped(plan: Plan, calls: Calls, around: Callable[[Act, Any], Any]) -> Calls:
    """The same, each called through what `around` returns for it."""
    acts = {stage: _called(plan, stage) for stage in Stage}
    return {
        stage: [(around(act, call), ctx) for act, (call, ctx) in zip(acts[stage], pairs, strict=True)]
        for stage, pairs in calls.items()
    }


def _called(plan: Plan, stage: Stage) -> list[Act]:
    return [act for act in plan.at(stage) if act.call is not None]


def _context(run: Windows, act: Act) -> Any:
    kind = SetupContext if act.stage in _SETUP else StepContext
    return kind(run, key_of(act.part), run.plan.facts_at(act))
