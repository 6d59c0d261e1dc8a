"""The second half of a load: what was checked goes into the model, the optimizer and the loop's own objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from fleetx.engine import state as engine_state
from fleetx.engine.checkpoint import random_states, snapshot, tree
from fleetx.engine.checkpoint.chunks import Chunks, HeldBy
from fleetx.engine.checkpoint.manifest import SavedTraining
from fleetx.engine.checkpoint.snapshot import NONE, NUMBER, Extras
from fleetx.engine.dtensors import local
from fleetx.engine.engine import Engine
from fleetx.errors import FleetxError, UsageError


@dataclass
class Checked:
    """A checkpoint that fits this training."""

    training: SavedTraining
    chunks: Chunks
    state: dict[str, Any]  # of the rank whose state this one restores
    saved: Any  # what `engine.state` loads
    same: bool  # are these the same ranks, so that each restores its own state?


@torch.no_grad()
def restore(engine: Engine, found: Checked, extras: Extras) -> None:
    state = found.state
    own = frozenset({engine.world.rank}) if found.same else None
    # The strategy may have changed: ranks that updated on their own may have to be equal from now on.
    alike = engine.alike_ranks if found.same else None
    for name in ("scheduler", "loader"):  # first, because the user's objects may raise an error
        if (owner := getattr(extras, name)) is not None:
            _give_back(name, owner, state[name])
    for name, (module, _) in snapshot.extra_states(engine).items():
        _give_back(name or "the model", module, state["modules"][name])
    for name, t in snapshot.held(engine).items():
        trained = name in engine.names.values()
        _copy(found.chunks, f"model.{name}", t, alike if trained else own, mean=trained)
    _restore_optimizer(engine, found, alike)
    engine_state.load(engine, found.saved)
    engine.loaded = True  # here only: a state dict may be loaded on some ranks, and comparing is a collective
    _restore_parts(engine, found, alike)
    extras.loaded = state["extra"]
    if extras.extra is not None:  # the user's own dict
        extras.extra.clear()
        extras.extra.update(extras.loaded or {})
    extras.step = found.training.step
    if state["random"] is not None:
        random_states.restore(state["random"], engine.device)


def _give_back(name: str, owner: Any, saved: Any) -> None:
    try:
        if isinstance(owner, LRScheduler):  # it would silently accept the keys of another scheduler
            strange = sorted(key for key in saved.keys() - owner.state_dict().keys() if not key.startswith("_"))
            if strange:
                raise ValueError(f"it has no {strange[0]!r}")
        owner.set_extra_state(saved) if isinstance(owner, nn.Module) else owner.load_state_dict(saved)
    except FleetxError:
        raise
    except Exception as error:
        raise UsageError(
            f"{name} ({type(owner).__name__}) cannot load its saved state ({type(error).__name__}: {error}): is it "
            "different from the one in the saved run?"
        ) from error


def _copy(chunks: Chunks, name: str, t: Tensor, ranks: HeldBy, *, mean: bool) -> None:
    mine = snapshot.piece(t)
    if mine.tensor.numel():
        chunks.read(name, mine.region, mine.tensor, ranks=ranks, mean=mean)


def _restore_optimizer(engine: Engine, found: Checked, ranks: HeldBy) -> None:
    optimizer, chunks = engine.optimizer, found.chunks
    declared = getattr(optimizer, "declared", None) or [{}] * len(optimizer.param_groups)  # the strategy's options win
    for group, saved, own in zip(optimizer.param_groups, found.training.groups, declared, strict=True):
        for key, value in tree.decode(saved.options, no_tensor).items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            elif key not in own:
                group[key] = value
    optimizer.state.clear()
    keys = _keys(chunks)
    for name, p in snapshot.params(engine).items():
        saved_as = {_plain(key): f"optimizer.{name}.{key}" for key in keys.get(name, [])}
        mine = {key: full for key, full in saved_as.items() if not chunks.lacked(full, name, ranks)}
        if values := {key: _value(chunks, full, p, ranks) for key, full in mine.items()}:
            optimizer.state[p] = values


def _keys(chunks: Chunks) -> dict[str, list[str]]:
    """What the optimizer keeps for each parameter."""
    found: dict[str, list[str]] = {}
    for full in chunks.names():
        if full.startswith("optimizer."):
            name, _, key = full.removeprefix("optimizer.").rpartition(".")
            found.setdefault(name, []).append(key)
    return found


def check_optimizer(chunks: Chunks) -> None:
    """Raise ValueError if the state of the optimizer does not have the form in which it is saved."""
    for name, keys in _keys(chunks).items():
        for key in keys:
            _plain(key)
            dtype, shape, is_complex = chunks.described(f"optimizer.{name}.{key}")
            if is_complex and (shape[-1:] != (2,) or dtype not in _COMPLEX):
                raise ValueError(f"{key} of {name} is not complex")
            if key.endswith(NUMBER) and shape:
                raise ValueError(f"{key} of {name} is not a number")


_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def _restore_parts(engine: Engine, found: Checked, ranks: HeldBy) -> None:
    """Restore what parts keep for each parameter."""
    for start, (part, key) in snapshot.per_parameter(engine).items():
        saved = {n: p for n, p in snapshot.params(engine).items() if start + n in found.chunks}
        saved = {n: p for n, p in saved.items() if not found.chunks.lacked(start + n, n, ranks)}
        engine.state[part][key] = {n: local(_value(found.chunks, start + n, p, ranks)) for n, p in saved.items()}


def _plain(key: str) -> Any:
    return snapshot.key_of_spelled(key.removesuffix(NUMBER).removesuffix(NONE))


def _value(chunks: Chunks, full: str, p: Tensor, ranks: HeldBy) -> Any:
    """One entry of the state of a parameter."""
    if full.endswith(NONE):
        return None
    dtype, shape, is_complex = chunks.described(full)
    if is_complex:
        dtype, shape = _COMPLEX[dtype], shape[:-1]
    like = shape == tuple(p.shape)
    value = torch.zeros_like(p.detach(), dtype=dtype) if like else torch.zeros(shape, dtype=dtype)
    _copy(chunks, full, value, ranks, mean=True)
    return value.item() if full.endswith(NUMBER) else value


def no_tensor(name: str) -> Tensor:
    raise ValueError("a group of the optimizer cannot have a tensor")
