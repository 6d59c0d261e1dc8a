"""What an engine adds to its optimizer's state_dict(): {version, round, merged, withheld, facts, rank, ranks, parts},
`weights` if `fleet.weight` is used, the `order` of the parameters in the buckets of the reduction, and the `extra` data
of a front end. torch.distributed.checkpoint gets it in another form: see `dcp.py`.

Plain tensors, numbers and names: `torch.load(weights_only=True)` reads it, and plain PyTorch ignores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fleetx.base.seams import pytree
from fleetx.base.user_line import warn
from fleetx.engine import dcp
from fleetx.engine.dtensors import refuse_pickling
from fleetx.engine.run import Step, key_of
from fleetx.errors import UsageError
from fleetx.strategy.part import every, switch_of
from fleetx.strategy.stage import Stage

if TYPE_CHECKING:
    from fleetx.engine.engine import Engine

VERSION = 1


_MARK = "fleetx"  # an option of the first group: what `dcp` makes, or a mark of a checkpoint inside a merge window


def unmarked(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != _MARK} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def check_not_loaded(optimizer: Optimizer) -> None:
    """Raise an error if a plain optimizer was loaded from a checkpoint with an unfinished merge window."""
    left = [group[_MARK] for group in optimizer.param_groups if _MARK in group]
    merged = sum(dcp.merged_in(found) if isinstance(found, Mapping) else found for found in left)
    if merged:
        raise UsageError(
            f"the optimizer was loaded before fleet.distribute, so {merged} step{'s' if merged > 1 else ''} of a merge "
            "window in the checkpoint would be lost: make the optimizer again and call optimizer.load_state_dict() "
            "after fleet.distribute, or call fleet.flush() before saving"
        )
    for group in optimizer.param_groups:
        group.pop(_MARK, None)


def save(engine: Engine) -> dict[str, Any]:
    engine.saved_at = engine.clock
    clock: dict[str, Any] = {"version": VERSION, "round": engine.round, "merged": engine.merged}
    if engine.weights.used:
        clock["weights"] = engine.weights.saved()
    if engine.extra:
        clock["extra"] = dict(engine.extra)
    if engine.reducer is not None and engine.reducer.order is not None:
        clock["order"] = list(engine.reducer.order)
    # Copied into new containers, which nothing else changes.
    parts = {k: pytree.tree_map(lambda value: value, s) for k, s in engine.state.items() if s}
    return clock | engine.gradients.saved() | {"parts": parts}


def checked(engine: Engine, saved: Mapping[str, Any] | None, *, own: bool = True) -> Mapping[str, Any]:
    """Check what is about to be loaded. None: a checkpoint of plain PyTorch.

    own: is the state of the parts as one rank saved it? Otherwise it was made for any rank.
    """
    engine.check_not_lent()
    if saved is None:
        if any(engine.state.values()) or engine.plan.at(Stage.GATE):
            warn("the checkpoint has no fleetx state: strategies start from the beginning")
        return {"round": 0, "merged": 0, "withheld": {}, "parts": engine.initial_state()}
    if saved["version"] > VERSION:
        raise UsageError(f"this checkpoint was written by a newer fleetx (format {saved['version']}): upgrade fleetx")
    if lost := sorted({k for k, s in saved["parts"].items() if s} - {k for k, s in engine.state.items() if s}):
        switch_by_key = {part.__name__: switch for switch, part in every().items()}
        switches = " and ".join(f"`{switch_by_key.get(key, key)}`" for key in lost)
        warn(f"the checkpoint has state of {switches} that this strategy does not use: it is ignored")
    engine.gradients.check(saved)
    if own:
        _check_rank(engine, saved)
    return saved


def _check_rank(engine: Engine, saved: Mapping[str, Any]) -> None:
    """State that one rank accumulated would be counted twice by another."""
    mine = [part for part in engine.plan.parts if part.belongs_to_rank(saved["parts"].get(key_of(part), {}))]
    here = (engine.world.rank, engine.world.size)
    if (saved["rank"], saved["ranks"]) != here and mine:
        switches = " and ".join(switch_of(type(part)) for part in mine)
        raise UsageError(
            f"this checkpoint was saved by rank {saved['rank']} of {saved['ranks']}, and only that rank can use the "
            f"state of {switches} in it, but this is rank {here[0]} of {here[1]}: save one checkpoint per rank, or "
            "delete its 'fleetx' entry to start without residuals"
        )


def load(engine: Engine, saved: Mapping[str, Any]) -> None:
    engine.gradients.load(saved)
    engine.round, engine.merged = saved["round"], saved["merged"]
    engine.weights.load(saved.get("weights"), inside=engine.merged > 0)
    engine.extra = dict(saved.get("extra", {}))
    if engine.reducer is not None:
        engine.reducer.restore_order(saved.get("order"))
    engine.step = Step()
    for part in engine.plan.parts:
        key = key_of(part)
        if key in saved["parts"]:
            # A copy: the checkpoint belongs to the caller.
            found = saved["parts"][key]
            engine.state[key] = pytree.tree_map_only(Tensor, lambda t: t.to(engine.device, copy=True), found)
        else:  # what it has kept belongs to the training that was abandoned
            engine.state[key] = engine.initial(part)
    engine.in_progress = {key: {} for key in engine.in_progress}  # it belongs to the training that was abandoned


class Hooks:
    """What the engine registers on the optimizer, for `state_dict` and `load_state_dict`."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._loading: Mapping[str, Any] = {}
        self._from_torch: dict[str, Any] | None = None  # what `dcp` has found

    def registered(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return [
            optimizer.register_state_dict_pre_hook(self.prepare),
            optimizer.register_state_dict_post_hook(self.save),
            optimizer.register_load_state_dict_pre_hook(self.check),
            optimizer.register_load_state_dict_post_hook(self.load),
        ]

    def prepare(self, optimizer: Optimizer) -> None:
        dcp.make_state(self._engine)

    def save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        engine = self._engine
        engine.drain(last=False)
        if dcp.calls():
            state_dict["param_groups"][0][_MARK] = dcp.encoded(engine, save(engine))
            dcp.complete(state_dict)
        else:
            state_dict["fleetx"] = save(engine)
            if engine.merged:  # plain PyTorch drops the window, but not the options of its groups: leave a mark there
                state_dict["param_groups"][0][_MARK] = engine.merged
        refuse_pickling(v for values in state_dict["state"].values() for v in values.values())

    def guard(self, model: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        """torch.save on rank 0 would write its shards as if they were the model."""
        if dcp.calls():
            dcp.refuse_stages(self._engine)
        if self._engine.layout.reduced:
            refuse_pickling(state_dict.values())

    def check(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Runs before torch looks at the rest, so it must not change anything yet."""
        found = dcp.found_in(state_dict, _MARK)
        state_dict = unmarked(state_dict)
        self._from_torch = None if found is None else dcp.decoded(self._engine, found)
        saved = state_dict.pop("fleetx", None) if self._from_torch is None else self._from_torch["state"]
        self._loading = checked(self._engine, saved)
        return state_dict

    def load(self, optimizer: Optimizer) -> None:
        load(self._engine, self._loading)
        self._engine.blank_state = False
        if self._from_torch is not None:
            dcp.give_back(self._engine, self._from_torch)

    def after_model(self, model: nn.Module, keys: Any) -> None:
        if dcp.calls():
            dcp.give_model_back(self._engine)
