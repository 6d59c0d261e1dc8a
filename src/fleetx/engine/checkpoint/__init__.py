"""`fleet.save` and `fleet.load`: a checkpoint that any number of stages, shards or ranks can resume from.

    folder/*.distcp, .metadata   tensors, by torch.distributed.checkpoint: "model.<name>", "optimizer.<name>.<key>"
    folder/fleetx.json           the optimizer's groups by parameter name, and the layout of the ranks
    folder/rank-<n>.pt           what belongs to one rank (residuals, merged gradients), and the clock

Each rank writes and reads only what it holds: no rank ever has the whole model. A folder is complete or absent: it is
written under another name and then renamed.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from fleetx.base.files import replace_folder
from fleetx.base.module_names import plain_name
from fleetx.engine import state as engine_state
from fleetx.engine.engine import Engine
from fleetx.errors import UsageError

VERSION = 1
_NUMBER = "#number"  # suffix of a key whose value is a plain number


def save(engine: Engine, folder: Path) -> None:
    """Every rank must call it."""
    engine.drain(last=False)
    world = engine.world
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    if world.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    world.barrier()
    with _quietly():
        dcp.save(_tensors(engine), storage_writer=FileSystemWriter(unfinished), no_dist=world.size == 1)
    torch.save(engine_state.save(engine), unfinished / f"rank-{world.rank}.pt")
    if world.rank == 0:
        (unfinished / "fleetx.json").write_text(json.dumps(_groups(engine), indent=1) + "\n")
    world.barrier()
    if world.rank == 0:
        replace_folder(unfinished, folder)
    world.barrier()


def load(engine: Engine, folder: Path) -> None:
    """Every rank must call it, after fleet.distribute and between steps."""
    described = _described(folder)
    same = described["layout"] == _layout(engine)
    own = folder / f"rank-{engine.world.rank if same else 0}.pt"
    saved = torch.load(own, map_location="cpu", weights_only=True)
    if not same:
        saved = saved | {"rank": -1}  # the state of another rank, whatever its number
    saved = engine_state.checked(engine, saved)
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = _room(engine, metadata)
    with _quietly():
        dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=engine.world.size == 1)
    _put(engine, state, described)
    engine_state.load(engine, saved)


def _described(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "fleetx.json").read_text())
    except FileNotFoundError:
        unfinished = folder.with_name(f"{folder.name}.unfinished").exists()
        hint = "; next to it is an unfinished one, from a run that was stopped while saving" if unfinished else ""
        raise UsageError(f"{folder} is not a checkpoint of fleet.save{hint}") from None
    if found["version"] > VERSION:
        raise UsageError(f"{folder} was written by a newer fleetx (format {found['version']}): upgrade fleetx")
    return found


def _layout(engine: Engine) -> list[Any]:
    """What must be equal for a rank to resume with its own state."""
    return [engine.world.size, *(repr(part) for part in engine.plan.parts if part.divides)]


@contextmanager
def _quietly() -> Iterator[None]:
    """torch warns when it saves for a single process, even if told to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


# --- what a rank holds ----------------------------------------------------------------------------
def _held(engine: Engine) -> dict[str, Tensor]:
    model = engine.model
    named = [*model.named_parameters(), *model.named_buffers()]
    kept = model.state_dict(keep_vars=True).keys()  # without non-persistent buffers
    return {plain_name(n): t for n, t in named if n in kept and n not in engine.layout.absent}


def _params(engine: Engine) -> dict[str, nn.Parameter]:
    return {engine.names[p]: p for p in engine.gradients.params() if p in engine.names}


def _tensors(engine: Engine) -> dict[str, Any]:
    state: dict[str, Any] = {f"model.{name}": t.detach() for name, t in _held(engine).items()}
    for name, p in _params(engine).items():
        for key, value in engine.optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                state[f"optimizer.{name}.{key}"] = value
            elif isinstance(value, int | float):
                state[f"optimizer.{name}.{key}{_NUMBER}"] = torch.tensor(value)
            elif value is not None:
                raise UsageError(
                    f"{type(engine.optimizer).__name__} keeps a {type(value).__name__} ({key}) per parameter, which "
                    "fleet.save cannot write: use torch.save"
                )
    return state


def _groups(engine: Engine) -> dict[str, Any]:
    groups = []
    for group in engine.optimizer.param_groups:
        options = {k: _plain(v) for k, v in group.items() if k != "params"}
        groups.append({"params": [engine.names[p] for p in group["params"] if p in engine.names], "options": options})
    keys = sorted({k for s in engine.optimizer.state.values() for k in s})
    return {"version": VERSION, "layout": _layout(engine), "groups": groups, "keys": keys}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


# --- reading --------------------------------------------------------------------------------------
def _room(engine: Engine, metadata: dict[str, Any]) -> dict[str, Any]:
    """Tensors to read into: the model's own, and new ones for the optimizer."""
    state: dict[str, Any] = {f"model.{name}": t.detach() for name, t in _held(engine).items()}
    if missing := sorted(key.removeprefix("model.") for key in state if key not in metadata):
        raise UsageError(f"the checkpoint does not have {', '.join(missing[:5])}: is it from another model?")
    known = {f"model.{plain_name(n)}" for n in (*engine.names.values(), *dict(engine.model.named_buffers()))}
    if strange := sorted(k.removeprefix("model.") for k in metadata if k.startswith("model.") and k not in known):
        raise UsageError(f"the checkpoint has {', '.join(strange[:5])}, which the model lacks: is it from another one?")
    for name, t in state.items():
        if tuple(metadata[name].size) != tuple(t.shape):
            raise UsageError(f"{name.removeprefix('model.')} is {tuple(metadata[name].size)} in the checkpoint and "
                             f"{tuple(t.shape)} in the model: build the model as in the saved run")  # fmt: skip
    for name, p in _params(engine).items():
        prefix = f"optimizer.{name}."
        for full in [k for k in metadata if k.startswith(prefix) and "." not in k.removeprefix(prefix)]:
            found = metadata[full]
            like = tuple(found.size) == tuple(p.shape)
            dtype = found.properties.dtype
            state[full] = (
                torch.zeros_like(p.detach(), dtype=dtype) if like else torch.zeros(tuple(found.size), dtype=dtype)
            )
    return state


def _put(engine: Engine, state: dict[str, Any], described: dict[str, Any]) -> None:
    """The model's tensors are read already; give the optimizer its state and the options of its groups."""
    optimizer, params = engine.optimizer, _params(engine)
    groups = [{**g["options"], "params": g["params"]} for g in described["groups"]]
    here = [[engine.names[p] for p in group["params"] if p in engine.names] for group in optimizer.param_groups]
    if [g["params"] for g in groups] != here:
        raise UsageError("the optimizer's groups differ from the checkpoint's: build it as in the saved run")
    declared = getattr(optimizer, "declared", None) or [{}] * len(groups)  # what the strategy declares wins
    for group, saved, own in zip(optimizer.param_groups, groups, declared, strict=True):
        group.update({k: v for k, v in saved.items() if k != "params" and k not in own})
    optimizer.state.clear()
    for name, p in params.items():
        prefix = f"optimizer.{name}."
        found = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        found = {k: v for k, v in found.items() if "." not in k}
        found = {k.removesuffix(_NUMBER): v.item() if k.endswith(_NUMBER) else v for k, v in found.items()}
        if found:
            optimizer.state[p] = found
