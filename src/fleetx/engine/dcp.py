"""The engine's state in checkpoints of torch.distributed.checkpoint (DCP).

DCP saves the options of the optimizer's param groups. It saves only one copy of what several ranks have under the same
name, and loads only names that the loading run already has, in the sizes that they have there. So the state is stored
as bytes, in options of a param group, under names that follow from the strategy alone:

    fleetx.shared     what any number of ranks can resume from
    fleetx.rank_<n>   all of rank n's state, where ranks can differ; also its parameters, buffers and optimizer state,
                      as far as they may differ from those of the rank whose copy DCP saves

If a rank does not find its own state from the same moment as the shared state (because other ranks resume, or rank 0
has broadcast its state), it uses the shared state, or raises an error if that is not enough.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fleetx.base import seams
from fleetx.base.module_names import plain_name
from fleetx.engine.dtensors import local
from fleetx.engine.run import Run, key_of
from fleetx.errors import UsageError
from fleetx.strategy.part import switch_of
from fleetx.strategy.stage import Fact, Stage

if TYPE_CHECKING:
    from fleetx.engine.engine import Engine

_TORCH = "torch.distributed.checkpoint"
_SHARED = "shared"
_INSTEAD = "use fleet.save and fleet.load, which can"


def calls() -> bool:
    """Is torch.distributed.checkpoint calling?"""
    return _caller() is not None


def _caller() -> FrameType | None:
    """The innermost frame of torch.distributed.checkpoint."""
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    return next((frame for frame in frames if str(frame.f_globals.get("__name__")).startswith(_TORCH)), None)


def make_state(engine: Run) -> None:
    """Create the state of a new optimizer, because DCP loads only what is already there.

    `get_state_dict` creates it; if the optimizer itself is passed to DCP, nothing else does.
    """
    if calls() and not engine.plan.at(Stage.SCHEDULE):
        seams.init_optimizer_state(engine.optimizer)


def makes_state(engine: Run) -> bool:
    """Is this step torch's own, with zero gradients, to create the state of a new optimizer? It must not count."""
    if engine.optimizer.state or not calls():
        engine.drop_blank_state()
        return False
    engine.step.made_by_torch = engine.blank_state = True
    return True


def made_state(engine: Run) -> bool:
    if made := engine.step.made_by_torch:
        engine.step = engine.step.next()
    return made


def refuse_stages(engine: Run) -> None:
    if engine.plan.at(Stage.SCHEDULE):
        raise UsageError(
            "under pipeline each rank has only its stage of the model, which torch.distributed.checkpoint would take "
            f"for all of it: {_INSTEAD}"
        )


def _refuse_flat() -> None:
    """Raise an error for a flat state dict: it holds only options per parameter, and DCP silently drops the others."""
    caller = _caller()
    info = caller.f_locals.get("info") if caller is not None else None
    if getattr(info, "flatten_optimizer_state_dict", False):
        raise UsageError(
            "flatten_optimizer_state_dict=True leaves out the state of the strategies, which would be lost: remove it"
        )


# --- saving ---------------------------------------------------------------------------------------
def encoded(engine: Run, state: dict[str, Any]) -> dict[str, bytes]:
    """The engine's state, to be stored as an option of the optimizer's first param group."""
    refuse_stages(engine)
    _refuse_flat()
    parts = {key_of(part): part for part in engine.plan.parts}
    bound = [key for key, s in state["parts"].items() if parts[key].belongs_to_rank(s)]
    bound += [key_of(act.part) for act in engine.plan.acts if Fact.LOCAL in act.claim.makes]
    shared = {k: v for k, v in state.items() if k not in ("withheld", "rank")}
    shared["parts"] = {} if bound else state["parts"]
    shared["bound"] = sorted({switch_of(type(parts[key])) for key in bound})
    out = {_SHARED: _bytes({"state": shared, "blank": engine.blank_state})}
    if _ranks_differ(engine):
        out[_name(engine)] = _bytes({"state": state, "blank": engine.blank_state, **_own(engine)})
    return out


def complete(state_dict: dict[str, Any]) -> None:
    """Add empty state for parameters for which the optimizer keeps none, as under dgc: DCP requires it."""
    if state_dict["state"]:
        for group in state_dict["param_groups"]:
            for number in group["params"]:
                state_dict["state"].setdefault(number, {})


def _name(engine: Run) -> str:
    return f"rank_{engine.world.rank}"


def _ranks_differ(engine: Run) -> bool:
    """Can ranks have their own state? The strategy alone decides, because DCP loads only names that it is given."""
    own = any(part.per_rank_state for part in engine.plan.parts) or not engine.shares_buffers
    return own or bool(engine.plan.at(Stage.GATE)) or engine.plan.makes(Fact.LOCAL)


def _own(engine: Run) -> dict[str, Any]:
    """What may now differ between ranks, of the things of which DCP saves only one copy."""
    model, optimizer = dict[str, Tensor](), dict[str, Any]()
    if engine.world.size == 1:
        return {"model": model, "optimizer": optimizer}
    if engine.merged or not engine.shares_buffers or engine.plan.makes(Fact.LOCAL):
        model = {n: local(t.detach()) for n, t in engine.model.named_buffers()}
    if engine.plan.makes(Fact.LOCAL):
        model |= {n: local(t.detach()) for n, t in engine.model.named_parameters()}
        for p, name in engine.names.items():
            values = engine.optimizer.state.get(p, {})
            optimizer[name] = {k: local(v) if isinstance(v, Tensor) else v for k, v in values.items()}
    return {"model": {plain_name(n): t for n, t in model.items()}, "optimizer": optimizer}


def _bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# --- loading --------------------------------------------------------------------------------------
def found_in(state_dict: Mapping[str, Any], key: str) -> Mapping[str, bytes] | None:
    groups = state_dict["param_groups"]
    return next((g[key] for g in groups if isinstance(g.get(key), Mapping)), None)


def decoded(engine: Engine, saved: Mapping[str, bytes]) -> dict[str, Any]:
    """`state`, to be checked and loaded as from `optimizer.state_dict()`; and `blank`, `model`, `optimizer`."""
    refuse_stages(engine)
    found = _read(saved[_SHARED])
    shared = found["state"]
    if _name(engine) in saved:
        own = _read(saved[_name(engine)])
        same = all(own["state"][k] == shared[k] for k in ("round", "merged", "ranks"))
        if same and shared["ranks"] == engine.world.size:
            return own
    _check_shared(engine, shared)
    same = shared["ranks"] == engine.world.size
    state = {k: v for k, v in shared.items() if k != "bound" and (k != "order" or same)}
    rank = engine.world.rank if same else -1
    return {"state": state | {"withheld": {}, "rank": rank}, "blank": found["blank"], "model": {}, "optimizer": {}}


def merged_in(saved: Mapping[str, bytes]) -> int:
    """How many steps of an unfinished merge window the checkpoint has."""
    return _read(saved[_SHARED])["state"]["merged"]


def _check_shared(engine: Engine, shared: Mapping[str, Any]) -> None:
    """Raise an error if a rank cannot resume without its own state."""
    here = f"rank {engine.world.rank} of {engine.world.size}"
    if shared["merged"]:
        raise UsageError(
            f"this checkpoint was saved inside a merge window on {shared['ranks']} ranks, and has no gradients for "
            f"{here}: call fleet.flush() before saving, or {_INSTEAD} resume with a different number of ranks"
        )
    if shared["bound"]:
        raise UsageError(
            f"under {' and '.join(shared['bound'])} each of {shared['ranks']} ranks has its own state, and this "
            f"checkpoint has none for {here}: resume with as many ranks and the same strategy, or {_INSTEAD}"
        )


def _read(data: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


@torch.no_grad()
def give_back(engine: Run, found: Mapping[str, Any]) -> None:
    """Restore what this rank had, after torch has loaded one rank's copy."""
    params = {name: p for p, name in engine.names.items()}
    for name, values in found["optimizer"].items():
        kept = engine.optimizer.state[params[name]]
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(kept.get(key), Tensor):
                local(kept[key]).copy_(value)
            else:
                kept[key] = value
    engine.blank_state = found["blank"]
    engine.step.own = found["model"]
    give_model_back(engine)


@torch.no_grad()
def give_model_back(engine: Run) -> None:
    """Restore this rank's own model. Also called after torch loads the model, possibly later than the optimizer."""
    own = engine.step.own
    if own:
        for name, t in (*engine.model.named_parameters(), *engine.model.named_buffers()):
            if plain_name(name) in own:
                local(t.detach()).copy_(own[plain_name(name)])
