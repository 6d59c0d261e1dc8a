"""`fleet.export`: the model alone, as one safetensors file under torch's names, for other programs.

Each rank writes what it holds into its place in the file, so no rank needs memory for the whole model. Only the files
that it writes are replaced in the folder, each by a rename when it is complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleetx.base.files import sync
from fleetx.base.module_names import plain_name
from fleetx.engine.checkpoint import tensor_file
from fleetx.engine.checkpoint.snapshot import held, piece
from fleetx.engine.checkpoint.together import on_first, together
from fleetx.engine.checkpoint.write import SAVING, check_shared
from fleetx.engine.engine import Engine
from fleetx.errors import UsageError

MODEL = "model.safetensors"


def export(engine: Engine, folder: Path) -> None:
    """Every rank must call it."""
    if left := engine.unfinished():
        raise UsageError(f"fleet.export was called {left[0]}: call fleet.flush() first")
    world = engine.world
    mine = held(engine)
    described = together(world, folder, lambda: {name: _described(t) for name, t in mine.items()})
    header, places, total = _laid_out(described, _aliases(engine))
    token = on_first(world, folder, lambda: uuid.uuid4().hex[:8])
    temporary = folder / f".export.{token}{SAVING}"  # inside the folder: its parent may be on another disk
    try:
        on_first(world, folder, lambda: _begin(temporary, header, total))
        together(world, folder, lambda: check_shared(temporary, world))
        pieces = described[world.rank]
        alike = {name: [r for r, theirs in enumerate(described) if theirs.get(name) == pieces[name]] for name in mine}
        todo = {name: t for name, t in mine.items() if min(alike[name]) == world.rank}
        together(world, folder, lambda: _write(temporary / MODEL, todo, places))
        on_first(world, folder, lambda: _finish(engine, temporary, folder))
    except BaseException:
        if world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            with contextlib.suppress(OSError):  # it is not empty: it was there before
                folder.rmdir()
        raise


def _described(t: Tensor) -> list[Any]:
    if t.is_complex():
        raise UsageError("fleet.export cannot write complex tensors, which safetensors does not have: use fleet.save")
    mine = piece(t)
    return [tensor_file.NAMES[mine.tensor.dtype], list(mine.offsets), list(mine.tensor.shape), list(mine.whole)]


def _aliases(engine: Engine) -> dict[str, list[str]]:
    """The names under which state_dict() lists each tensor: a tied weight has several."""
    found: dict[int, list[str]] = {}
    for name, t in engine.model.state_dict(keep_vars=True).items():
        found.setdefault(id(t), []).append(plain_name(name))
    named = [*engine.model.named_parameters(), *engine.model.named_buffers()]
    return {plain_name(name): found.get(id(t), [plain_name(name)]) for name, t in named}


def _laid_out(
    described: list[dict[str, list[Any]]], aliases: dict[str, list[str]]
) -> tuple[bytes, dict[str, list[int]], int]:
    """The header, where each tensor begins in the file (once per alias), and the size of the file."""
    whole = {name: (dtype, shape) for rank in described for name, (dtype, _, _, shape) in rank.items()}
    names = {name: aliases.get(name, [name]) for name in whole}
    every = {alias: whole[name] for name in whole for alias in names[name]}
    header, starts, size = tensor_file.laid_out(every, {"__metadata__": {"format": "pt"}})
    return header, {name: [starts[alias] for alias in names[name]] for name in whole}, size


def _begin(temporary: Path, header: bytes, total: int) -> None:
    folder = temporary.parent
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError(f"{folder} is a file, but fleet.export writes a folder: choose another name, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f".export.????????{SAVING}"):  # left by killed runs
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir()
    with (temporary / MODEL).open("xb") as file:
        file.write(header)
        file.truncate(total)


def _write(path: Path, tensors: dict[str, Tensor], places: dict[str, list[int]]) -> None:
    try:
        with path.open("r+b") as file:
            for name, t in tensors.items():
                mine = piece(t)
                if list(mine.tensor.shape[1:]) != list(mine.whole[1:]):
                    why = "which is not divided along its first dimension: use fleet.save"
                    raise UsageError(f"fleet.export cannot write {name}, {why}")
                row = mine.tensor.element_size() * torch.Size(mine.whole[1:]).numel()
                for start in places[name]:
                    file.seek(start + row * (mine.offsets or (0,))[0])
                    file.write(tensor_file.bytes_of(mine.tensor))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _finish(engine: Engine, temporary: Path, folder: Path) -> None:
    config: Any = getattr(engine.model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(temporary)
    for path in sorted(temporary.iterdir()):  # one by one: other files in the folder stay
        path.replace(folder / path.name)
    temporary.rmdir()
    sync(folder)
