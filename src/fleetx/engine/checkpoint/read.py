"""Resume from a checkpoint: first everything is checked, on all ranks; then the training is changed.

1  the manifest, sizes and hashes: each rank hashes a share of the files
2  the documents and the index are parsed, and compared with the model, the optimizer and the strategy
3  tensors are copied, and the loop's own objects restored (restore.py)
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleetx.base.files import stepped_aside
from fleetx.base.module_names import plain_name
from fleetx.base.trees import as_real
from fleetx.base.user_line import warn
from fleetx.comm.world import World
from fleetx.engine import state as engine_state
from fleetx.engine.checkpoint import manifest, random_states, snapshot, tree
from fleetx.engine.checkpoint.chunks import Chunks
from fleetx.engine.checkpoint.manifest import SavedTraining
from fleetx.engine.checkpoint.restore import Checked, check_optimizer, no_tensor, restore
from fleetx.engine.checkpoint.snapshot import Extras, Piece, Region
from fleetx.engine.checkpoint.together import together
from fleetx.engine.engine import Engine
from fleetx.engine.run import key_of
from fleetx.errors import CheckpointError, FleetxError, UsageError
from fleetx.optim.layerwise import Layerwise


def read(engine: Engine, folder: Path, extras: Extras) -> SavedTraining:
    """Every rank must call it, after fleet.distribute and between steps."""
    folder = place_of(folder)
    verify(folder, engine.world)
    found: list[Checked] = []
    together(engine.world, folder, lambda: found.append(_check(engine, folder, extras)))
    restore(engine, found[0], extras)
    return found[0].training


def verify(folder: Path, world: World) -> manifest.Manifest:
    """Raise an error on every rank if a file is missing or has changed."""
    found: list[manifest.Manifest] = []

    def check() -> None:
        found.append(manifest.read(folder))
        manifest.check_sizes(folder, found[0])
        manifest.check_hashes(folder, found[0], share=world.rank, shares=world.size)

    together(world, folder, check)
    return found[0]


def described(folder: Path) -> SavedTraining:
    """What the ranks of a checkpoint had in common. Its files must have been checked."""
    return manifest.parsed(SavedTraining, place_of(folder), manifest.TRAINING)


def place_of(folder: Path) -> Path:
    """Where a checkpoint is: a run killed while replacing it may have left only the old one, under another name."""
    aside = stepped_aside(folder)
    return aside if not os.path.lexists(folder) and aside.is_dir() else folder


# --- checks ---------------------------------------------------------------------------------------
def _check(engine: Engine, folder: Path, extras: Extras) -> Checked:
    training = manifest.parsed(SavedTraining, folder, manifest.TRAINING)
    chunks = Chunks(folder, manifest.parsed(manifest.Index, folder, manifest.INDEX), training.ranks)
    same = training.layout == snapshot.layout(engine) and training.ranks == engine.world.size
    rank = engine.world.rank if same else 0
    state = _state_of(folder, chunks, rank)
    if not same:
        others = [_state_of(folder, chunks, other, copy=False) for other in range(1, training.ranks)]
        _use_shared(state, others)
        training = _at_boundary(training, state)
        state["fleetx"]["rank"] = -1  # of another rank, whatever its number
        state["fleetx"].pop("order", None)
        with _said(folder):
            saved_by = [s["fleetx"]["parts"] for s in (state, *others)]
            state["fleetx"]["parts"] = _taken_over(engine, chunks, saved_by)
    _check_model(engine, chunks)
    _check_modules(engine, state["modules"])
    _check_parts(engine, chunks)
    with _said(folder / manifest.INDEX):
        check_optimizer(chunks)
    with _said(folder / manifest.TRAINING):
        _check_groups(engine, training)
    with _said(folder / manifest.rank_json(rank)):
        saved = engine_state.checked(engine, state["fleetx"], own=same)
    for name in ("scheduler", "loader"):
        given = getattr(extras, name) is not None
        if given and state[name] is None:
            raise UsageError(
                f"the checkpoint was saved without {name}=..., so it has no state of a {name}: leave it out"
            )
        if not given and state[name] is not None and extras.whole and engine.world.rank == 0:
            warn(f"the checkpoint has the state of a {name}, but yours starts from scratch: pass {name}=... too")
    return Checked(training, chunks, state, saved, same)


def _at_boundary(training: SavedTraining, state: dict[str, Any]) -> SavedTraining:
    """Other ranks cannot use half a merge window, so they start it again: its samples have not changed the model."""
    saved, boundary = state["fleetx"], state["boundary"]
    if not saved["merged"]:
        return training
    if not boundary or (boundary["loader"] is None) != (state["loader"] is None):
        raise UsageError(
            "this checkpoint was saved inside a merge window, with different ranks, stages or shards: the gradients in "
            "it belong to the ranks that computed them. Call fleet.flush() before saving, or resume with the same ranks"
        )
    state["loader"] = boundary["loader"]
    saved |= {"merged": 0, "withheld": {}}
    if "weights" in saved:
        saved["weights"] = {**saved["weights"], "own": 0.0}
    return training.model_copy(update={"step": boundary["step"]})


def _state_of(folder: Path, chunks: Chunks, rank: int, *, copy: bool = True) -> dict[str, Any]:
    """copy: copy the tensors; otherwise they are views into the file."""
    document = manifest.parsed(manifest.RankState, folder, manifest.rank_json(rank))
    path = folder / manifest.rank_json(rank)
    if document.rank != rank:
        raise CheckpointError(path, f"belongs to rank {document.rank}")

    def tensor(name: str) -> Tensor:
        if not name.startswith("state.") or name not in chunks.file(rank):
            raise CheckpointError(path, f"refers to {name[:40]!r}, which is not in its tensors")
        found = chunks.file(rank).tensor(name)
        return found.clone() if copy else found

    with _said(path):
        state = {key: tree.decode(value, tensor) for key, value in document.model_dump().items()}
        manifest.checked(manifest.Clock, path, state["fleetx"])
        if state["boundary"] is not None:
            manifest.checked(manifest.WindowStart, path, state["boundary"])
        random_states.check(state["random"])
    return state


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """Turn the errors of Python and torch about malformed data into an error about this file."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
        if isinstance(error, FleetxError):
            raise
        raise CheckpointError(path, f"is not valid: {type(error).__name__}: {error}") from error


def _use_shared(state: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """For ranks other than those that saved: use only what was the same on all of those."""
    if any(other["loader"] != state["loader"] for other in others):
        raise UsageError(
            "this checkpoint was saved by a different number of ranks, each with its own loader state, which no other "
            "rank can take over: use a loader of fleetx.data, whose state is the same on all ranks"
        )
    if any(not _equal(other["random"], state["random"]) for other in others):
        state["random"] = None


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) else a[k] == b[k] for k in a
    )


def _check_model(engine: Engine, chunks: Chunks) -> None:
    mine = snapshot.held(engine)
    if missing := sorted(name for name in mine if f"model.{name}" not in chunks):
        raise UsageError(f"the checkpoint does not have {', '.join(missing[:5])}: is it from another model?")
    known = {f"model.{plain_name(n)}" for n in (*engine.names.values(), *dict(engine.model.named_buffers()))}
    strange = sorted(n.removeprefix("model.") for n in chunks.names() if n.startswith("model.") and n not in known)
    if strange:
        raise UsageError(
            f"the checkpoint has {', '.join(strange[:5])}, but the model does not: is it from another model?"
        )
    for name, t in mine.items():
        dtype, shape, _ = chunks.described(f"model.{name}")
        here = snapshot.piece(t)
        if shape != here.whole or dtype is not here.tensor.dtype:
            raise UsageError(
                f"{name} is {dtype} {list(shape)} in the checkpoint and {here.tensor.dtype} {list(here.whole)} in the "
                "model: build the model as in the saved run"
            )


def _check_modules(engine: Engine, saved: dict[str, Any]) -> None:
    """Check what modules keep besides tensors (get_extra_state)."""
    if odd := sorted(saved.keys() ^ snapshot.extra_states(engine).keys()):
        where = "the checkpoint" if odd[0] in saved else "the model"
        raise UsageError(f"only {where} has an extra state of {odd[0]!r}: build the model as in the saved run")


def _check_parts(engine: Engine, chunks: Chunks) -> None:
    for name, p in snapshot.params(engine).items():
        for start in snapshot.per_parameter(engine):
            whole = snapshot.piece(p).whole
            if start + name in chunks and chunks.described(start + name)[1] != whole:
                raise UsageError(f"{start + name} in the checkpoint does not have the shape {list(whole)} of {name}")


def _check_groups(engine: Engine, training: SavedTraining) -> None:
    optimizer = engine.optimizer
    continues = optimizer.continues if isinstance(optimizer, Layerwise) else ()
    if training.optimizer not in ("", type(optimizer).__name__, *continues):
        raise UsageError(
            f"the checkpoint is of {training.built or training.optimizer}, and this optimizer is "
            f"{snapshot.built(engine)}: resume with the optimizer and strategy of the saved run. To start from the "
            "model alone, call fleet.export in the saved run"
        )
    here = [[engine.names[p] for p in group["params"] if p in engine.names] for group in engine.optimizer.param_groups]
    if [g.params for g in training.groups] != here:
        raise UsageError("the optimizer's groups differ from the checkpoint's: build it as in the saved run")
    decoded = [tree.decode(saved.options, no_tensor) for saved in training.groups]
    for group, options in zip(engine.optimizer.param_groups, decoded, strict=True):
        if not isinstance(options, dict):
            raise ValueError("the options of a group are not named")
        wanted = {key: _kind(engine.optimizer.defaults.get(key, group.get(key))) for key in options}
        if wrong := [key for key in options if wanted[key] and wanted[key] != _kind(options[key])]:
            raise ValueError(f"{wrong[0]} is not a {wanted[wrong[0]]}")
    if isinstance(optimizer, Layerwise) and training.optimizer in continues:
        try:
            optimizer.check_saved(decoded)
        except ValueError as error:
            raise UsageError(f"{error}: resume with the optimizer and strategy of the saved run") from error


def _kind(value: Any) -> str:
    """The kind of an option's value, or "" if it can be of several kinds."""
    if isinstance(value, Tensor | int | float) and not isinstance(value, bool):
        return "number"
    return "tuple" if isinstance(value, tuple) else ""


# --- each rank's own state of every parameter, for ranks other than those that saved ---
def _taken_over(engine: Engine, chunks: Chunks, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of the parts here, from those of each rank that saved."""
    found: dict[str, Any] = dict(states[0])
    for part in engine.plan.parts:
        if (key := key_of(part)) not in found:
            continue
        own = [state[key] for state in states]
        found[key] = part.for_other_ranks(own)
        for kept in part.own_per_parameter:
            if any(kept in one for one in own):
                found[key] = found[key] | {kept: _mean_of(engine, chunks, [one.get(kept, {}) for one in own])}
    return found


def _mean_of(engine: Engine, chunks: Chunks, kept: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    here = {name: snapshot.piece(t) for name, t in snapshot.held(engine).items()}
    names = dict.fromkeys(name for one in kept for name in one if name in here and f"model.{name}" in chunks)
    return {
        name: _piece(here[name], chunks.regions(f"model.{name}"), [one.get(name) for one in kept]) for name in names
    }


def _piece(here: Piece, regions: Mapping[int, Region], kept: Sequence[Tensor | None]) -> Tensor:
    """The mean over the ranks that saved; a rank that kept nothing counts as zero."""
    total = torch.zeros(here.whole, dtype=torch.float64)
    count = Counter(regions.values())
    for rank, t in enumerate(kept):
        if t is not None and rank in regions:
            region = regions[rank]
            total[_slices(region)] += as_real(t).reshape(region[1]).double() / count[region]
    dtype = next(t for t in kept if t is not None).dtype
    mine = total[_slices(here.region)]
    return torch.view_as_complex(mine.contiguous()).to(dtype) if dtype.is_complex else mine.to(dtype)


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(*region, strict=True))
