"""Write a checkpoint into a folder beside its destination, then rename it into place.

    1  rank 0 makes the folder
    2  the ranks compare what they hold: if several hold the same piece, one of them writes it
    3  each rank writes its files
    4  rank 0 writes the index and the manifest, syncs the folder and renames it: now the checkpoint exists

If a rank fails in one phase, all of them raise its error, and rank 0 removes the folder. A killed run leaves the folder
behind, under a name that is never read; the next save removes it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import uuid
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleetx.base.files import replace_folder, sync
from fleetx.comm.world import World
from fleetx.engine.checkpoint import manifest, tensor_file
from fleetx.engine.checkpoint.hashing_file import Written
from fleetx.engine.checkpoint.snapshot import Piece, Snapshot, first_not_finite
from fleetx.engine.checkpoint.together import on_first, together
from fleetx.errors import CheckpointError, UsageError

SAVING = ".saving"  # suffix of a folder that is being written
OURS = 0o775  # regardless of the umask: a folder that every user can change is not read
_BLOCK = 1 << 15  # numbers that are hashed together


def write(snapshot: Snapshot, folder: Path, world: World, *, only_finite: bool = False) -> str:
    """Every rank must call it. Returns which parameter is not finite, or "".

    only_finite: leave no checkpoint if there is such a parameter.
    """
    temporary = folder.with_name(on_first(world, folder, lambda: _begin(folder)))
    try:
        described = together(world, folder, lambda: _describe(snapshot, temporary, world))
        writers = _share_out(described)
        answers = together(world, folder, lambda: _write_own(snapshot, temporary, writers, only_finite))
        files = [written for written, _ in answers]
        poisoned: str = next((name for _, name in answers if name), "")
        if poisoned and only_finite:
            if world.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            return poisoned
        on_first(world, folder, lambda: _commit(snapshot, folder, temporary, described, writers, files))
        return poisoned
    except BaseException:
        if world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _begin(folder: Path) -> str:
    """Make the folder to write into, and return its name."""
    _check_place(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{escape(folder.name)}.????????{SAVING}"):  # left by killed runs
        shutil.rmtree(left, ignore_errors=True)
    made = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}{SAVING}")
    made.mkdir(OURS)
    return made.name


def _check_place(folder: Path) -> None:
    """Only a checkpoint may be replaced, never anything else."""
    if folder.name in ("", ".."):
        raise UsageError(f"fleet.save({str(folder)!r}): a checkpoint needs its own folder: add a name for it")
    if not os.path.lexists(folder):
        return
    if not folder.is_symlink() and folder.is_dir():
        found = {path.name for path in folder.iterdir()}
        others = sorted(name for name in found if not manifest.is_ours(name))
        if not others and (not found or any(map(manifest.only_ours, found))):
            return
        what = f"is a folder with other files ({', '.join((others or sorted(found))[:3])})"
    else:
        what = "is a symbolic link" if folder.is_symlink() else "is a file"
    raise UsageError(f"{folder} {what}, which fleet.save would delete: choose a new name, or remove it yourself")


def check_shared(made: Path, world: World) -> None:
    """made: a folder that rank 0 has just made, with a name that was never used."""
    if not made.is_dir():
        raise CheckpointError(
            made.parent,
            f"rank {world.rank} on {socket.gethostname()} does not see the folder that rank 0 made: use a folder that "
            "all nodes share (`fleetx doctor` checks one)",
        )


# --- who writes what ------------------------------------------------------------------------------
Described = list[dict[str, list[Any]]]  # by rank: {name: [dtype, offsets, shape, whole, bytes, digest]}


def _describe(snapshot: Snapshot, temporary: Path, world: World) -> dict[str, list[Any]]:
    check_shared(temporary, world)
    return {name: _described(piece, world.size == 1) for name, piece in snapshot.pieces.items()}


def _described(piece: Piece, alone: bool) -> list[Any]:
    t = piece.tensor
    dtype = ("C" if piece.is_complex else "") + tensor_file.NAMES[t.dtype]
    return [dtype, piece.offsets, list(t.shape), piece.whole, t.nbytes, "" if alone else digest(t)]


def digest(t: Tensor) -> str:
    """Equal for tensors that are equal bit for bit, and in practice only for those.

    Fast rather than safe against an adversary: numbers are multiplied by fixed random ones and added up modulo 2**64,
    at several times the speed of sha256, which then hashes the sums.
    """
    data = tensor_file.bytes_of(t)
    whole = len(data) // (8 * _BLOCK) * 8 * _BLOCK
    sha = hashlib.sha256(data[whole:])
    if whole:
        numbers = torch.frombuffer(data, dtype=torch.int64, count=whole // 8)
        sha.update(tensor_file.bytes_of(numbers.view(-1, _BLOCK) @ _multipliers()))
    return sha.hexdigest()[:32]


@cache
def _multipliers() -> Tensor:
    made = torch.randint(-(2**62), 2**62, (_BLOCK,), generator=torch.Generator().manual_seed(7))
    return made * 2 + 1  # odd: no change of a single number is lost


def _share_out(described: Described) -> dict[tuple[int, str], int]:
    """(rank, name) of each piece -> the rank that writes it: of those that hold the same, the one with least to do."""
    holders: dict[tuple[Any, ...], list[int]] = {}
    for rank, pieces in enumerate(described):
        for name, [_, offsets, shape, _, _, found] in pieces.items():
            holders.setdefault((name, *offsets, *shape, found), []).append(rank)
    load = [0] * len(described)
    writers: dict[tuple[int, str], int] = {}
    for (name, *_), ranks in sorted(holders.items(), key=lambda item: len(item[1])):  # first those without a choice
        writer = min(ranks, key=lambda r: (load[r], r))
        load[writer] += described[writer][name][4]
        writers |= {(rank, name): writer for rank in ranks}
    return writers


def _index(described: Described, writers: dict[tuple[int, str], int]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for rank, pieces in enumerate(described):
        for name, [dtype, offsets, shape, whole, *_] in pieces.items():
            entry = entries.setdefault(name, {"dtype": dtype, "shape": whole, "chunks": {}})
            chunk = {"offsets": offsets, "shape": shape, "writer": writers[rank, name], "holders": []}
            entry["chunks"].setdefault(writers[rank, name], chunk)["holders"].append(rank)
    return {"tensors": {n: {**entry, "chunks": list(entry["chunks"].values())} for n, entry in entries.items()}}


# --- files ----------------------------------------------------------------------------------------
def _write_own(
    snapshot: Snapshot, temporary: Path, writers: dict[tuple[int, str], int], only_finite: bool
) -> tuple[dict[str, Written], str]:
    """The files, by name, and which parameter in them is not finite, or what a part keeps for one."""
    rank = snapshot.rank
    mine = {name: piece.tensor for name, piece in snapshot.pieces.items() if writers[rank, name] == rank}
    poisoned = first_not_finite({name: t for name, t in mine.items() if name in snapshot.trained})
    kept = first_not_finite({text: snapshot.own[name] for name, text in snapshot.kept.items()})
    if kept and not only_finite:
        raise UsageError(
            f"fleet.save: {kept} is not finite, because an unchecked gradient was not finite, so training that resumed "
            "from here would destroy the parameters: load an older checkpoint, and pass "
            "fleet.init(checks=fleet.Checks(every_gradient=True)) to skip such updates"
        )
    poisoned = f"parameter {poisoned!r}" if poisoned else kept
    if poisoned and only_finite:
        return {}, poisoned
    tensors, document = manifest.rank_tensors(rank), manifest.rank_json(rank)
    return {
        tensors: tensor_file.write(temporary / tensors, mine | snapshot.own),
        document: tensor_file.write_bytes(temporary / document, manifest.as_bytes(snapshot.document)),
    }, poisoned


def _commit(
    snapshot: Snapshot,
    folder: Path,
    temporary: Path,
    described: Described,
    writers: dict[tuple[int, str], int],
    files: list[dict[str, Written]],
) -> None:
    documents = {manifest.TRAINING: snapshot.training, manifest.INDEX: _index(described, writers)}
    listed = {name: file for of_rank in files for name, file in of_rank.items()}
    for name, document in documents.items():
        listed[name] = tensor_file.write_bytes(temporary / name, manifest.as_bytes(document))
    content = manifest.as_bytes(
        {
            "format": "fleetx checkpoint", "version": manifest.VERSION,
            **{key: snapshot.training[key] for key in ("step", "round", "ranks")},
            "files": {name: {"size": size, "sha256": sha} for name, (size, sha) in sorted(listed.items())},
        }
    )  # fmt: skip
    tensor_file.write_bytes(temporary / manifest.MANIFEST, content)
    tensor_file.write_bytes(temporary / manifest.DIGEST, manifest.digest_line(content))
    sync(temporary)
    replace_folder(temporary, folder)  # `load` still finds the old folder, moved aside
