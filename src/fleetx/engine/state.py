"""What an engine adds to its optimizer's state_dict(): {version, round, merged, withheld, facts, rank, ranks, parts},
`weights` where `fleet.weight` is used, and `extra` of a front end.

Plain tensors, numbers and names: `torch.load(weights_only=True)` reads it, and plain PyTorch ignores it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fleetx.engine.run import Step
from fleetx.errors import UsageError
from fleetx.strategy.stage import Stage

if TYPE_CHECKING:
    from fleetx.engine.engine import Engine

VERSION = 1


def save(engine: Engine) -> dict[str, Any]:
    clock: dict[str, Any] = {"version": VERSION, "round": engine.round, "merged": engine.merged}
    if engine.weights.used:
        clock["weights"] = engine.weights.saved()
    if engine.extra:
        clock["extra"] = dict(engine.extra)
    return clock | engine.gradients.saved() | {"parts": {k: _rebuilt(s) for k, s in engine.state.items() if s}}


def checked(engine: Engine, saved: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Check what is about to be loaded. None: a checkpoint of plain PyTorch."""
    if saved is None:
        if any(engine.state.values()) or engine.plan.at(Stage.GATE):
            warnings.warn("the checkpoint has no state of fleetx: strategies start from the beginning", stacklevel=4)
        return {"round": 0, "merged": 0, "withheld": {}, "parts": engine.initial_state()}
    if saved["version"] > VERSION:
        raise UsageError(f"this checkpoint was written by a newer fleetx (format {saved['version']}): upgrade fleetx")
    if lost := sorted({k for k, s in saved["parts"].items() if s} - {k for k, s in engine.state.items() if s}):
        warnings.warn(f"the checkpoint has the state of {', '.join(lost)}, which is off now", stacklevel=4)
    engine.gradients.check(saved)
    _check_rank(engine, saved)
    return saved


def _check_rank(engine: Engine, saved: Mapping[str, Any]) -> None:
    """State that one rank accumulated would be counted twice by another."""
    mine = [type(part).__name__ for part in engine.plan.parts if part.per_rank_state]
    here = (engine.world.rank, engine.world.size)
    if (saved["rank"], saved["ranks"]) != here and any(saved["parts"].get(name) for name in mine):
        raise UsageError(
            f"this checkpoint was saved by rank {saved['rank']} of {saved['ranks']}, and only that rank can use the "
            f"state of {' and '.join(mine)} in it, but this is rank {here[0]} of {here[1]}: save one checkpoint per "
            "rank, or delete its 'fleetx' entry to start without residuals"
        )


def load(engine: Engine, saved: Mapping[str, Any]) -> None:
    engine.gradients.load(saved)
    engine.round, engine.merged = saved["round"], saved["merged"]
    engine.weights.load(saved.get("weights"), inside=engine.merged > 0)
    engine.extra = dict(saved.get("extra", {}))
    engine.step = Step()
    for key, state in saved["parts"].items():
        if key in engine.state:
            # A copy: the checkpoint stays the caller's.
            engine.state[key] = _rebuilt(state, lambda t: t.to(engine.device, copy=True))
    for notes in engine.notes.values():
        notes.pop("under_way", None)  # belongs to the training that was abandoned


def _rebuilt(value: Any, leaf: Callable[[Tensor], Tensor] = lambda t: t) -> Any:
    """The same values in new containers, which nothing else changes."""
    if isinstance(value, dict):
        return {k: _rebuilt(v, leaf) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_rebuilt(v, leaf) for v in value)
    return leaf(value) if isinstance(value, Tensor) else value
