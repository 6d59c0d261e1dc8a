"""The files of a checkpoint, their schema, and the check that none of them has changed since it was written.

    manifest.sha256          of manifest.json, in the format of sha256sum
    manifest.json            size and sha256 of each of the following, and how far the training has come
    training.json            what the ranks share: strategy, layout, the optimizer's groups, who wrote it
    index.json               which file has which piece of each tensor of the model and the optimizer
    rank-<n>.json            what belongs to one rank: state of the strategies, scheduler, loader, random numbers
    rank-<n>.safetensors     tensors: this rank's share of the pieces, and those of rank-<n>.json

Names are derived from the number of ranks, never read from a file, so no path can lead out of the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fleetx.engine.checkpoint.tensor_file import open_file
from fleetx.errors import CheckpointError

VERSION = 2  # 1 was torch.distributed.checkpoint with pickled metadata
MANIFEST, DIGEST, TRAINING, INDEX = "manifest.json", "manifest.sha256", "training.json", "index.json"
MAX_JSON = 512 * 1024 * 1024  # bytes
MAX_RANKS = 100_000


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=0, lt=2**53)]
RankNumber = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Sizes = Annotated[list[Count], Field(max_length=64)]


class File(Strict):
    size: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(Strict):
    format: Literal["fleetx checkpoint"]
    version: Literal[2]
    step: Count
    round: Count
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    files: dict[str, File]

    @property
    def progress(self) -> tuple[int, int]:
        """Grows with the training, even if the number of ranks changes, and with it the number of steps per update."""
        return self.round, self.step


class SavedGroup(Strict):
    """A param group of the optimizer."""

    params: list[str]
    options: dict[str, Any]


class SavedTraining(Strict):
    step: Count
    round: Count
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    replicas: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    window: Annotated[int, Field(ge=1, lt=2**31)]  # steps per update
    layout: list[str]
    strategy: dict[str, Any]
    groups: list[SavedGroup]
    optimizer: str = ""  # its class
    built: str = ""  # the same in the user's words
    fleetx: str
    torch: str


class Chunk(Strict):
    """A piece of a tensor: these ranks held it, and one of them wrote it."""

    offsets: Sizes
    shape: Sizes
    writer: RankNumber
    holders: list[RankNumber]


class SavedTensor(Strict):
    dtype: str
    shape: Sizes
    chunks: Annotated[list[Chunk], Field(min_length=1)]


class Index(Strict):
    tensors: dict[str, SavedTensor]


class RankState(Strict):
    rank: RankNumber
    fleetx: dict[str, Any]
    scheduler: Any
    loader: Any
    extra: Any
    random: dict[str, Any]
    boundary: Any  # step and loader at the start of the merge window
    modules: dict[str, Any] = {}  # what get_extra_state() of the model's modules returned


class Clock(Strict):
    """The structure of what `engine.state` saves, apart from tensors."""

    version: Count
    round: Count
    merged: Count
    withheld: dict[str, Any]
    facts: list[str]
    rank: Annotated[int, Field(ge=-1, lt=MAX_RANKS)]
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    parts: dict[str, dict[str, Any]]
    weights: dict[str, float] = {}
    order: list[str] = []
    extra: dict[str, Any] = {}


class WindowStart(Strict):
    """Where a merge window began."""

    step: Count
    loader: Any


def rank_json(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def rank_tensors(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def names(ranks: int) -> list[str]:
    each = [name for rank in range(ranks) for name in (rank_json(rank), rank_tensors(rank))]
    return [TRAINING, INDEX, *each]


def is_ours(name: str) -> bool:
    """Can a checkpoint have a file of this name?"""
    return name in (MANIFEST, TRAINING, INDEX) or only_ours(name)


def only_ours(name: str) -> bool:
    """Is it a name that hardly anything else has? Many programs have a manifest.json."""
    return name == DIGEST or re.fullmatch(r"rank-\d{5,}\.(json|safetensors)", name) is not None


def as_bytes(document: Any) -> bytes:
    return json.dumps(document, allow_nan=False, indent=1).encode() + b"\n"


def digest_line(manifest: bytes) -> bytes:
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


# --- reading --------------------------------------------------------------------------------------
def read(folder: Path) -> Manifest:
    """The manifest of a folder, after its own hash was checked; nothing else is opened."""
    _check_folder(folder)
    if not os.path.lexists(folder / MANIFEST):
        older = (folder / "fleetx.json").exists()
        why = "was written by an older fleetx, in a format with pickled parts: save it again" if older else (
            "has no manifest.json, so it is not a checkpoint of fleet.save"
        )  # fmt: skip
        raise CheckpointError(folder, why)
    path = folder / MANIFEST
    content = _content(path, MAX_JSON)
    if _content(folder / DIGEST, 1024) != digest_line(content):
        raise CheckpointError(path, f"does not have the hash in {DIGEST}: one of the two was changed or damaged")
    raw = _json(path, content)
    version = raw.get("version") if isinstance(raw, dict) else None
    if type(version) is int and version > VERSION:
        raise CheckpointError(path, f"was written by a newer fleetx (format {version}): upgrade fleetx")
    found = checked(Manifest, path, raw)
    if set(found.files) != set(names(found.ranks)):
        strange = sorted(set(found.files) ^ set(names(found.ranks)))
        raise CheckpointError(path, f"does not list the files of {found.ranks} ranks: {', '.join(strange[:3])[:200]}")
    return found


def _check_folder(folder: Path) -> None:
    try:
        mode = os.lstat(folder).st_mode
    except OSError as error:
        raise CheckpointError(folder, f"cannot be read: {error.strerror}") from error
    if stat.S_ISLNK(mode):
        raise CheckpointError(folder, "is a symbolic link: pass the folder that it points to")
    if not stat.S_ISDIR(mode):
        raise CheckpointError(folder, "is not a folder")
    if mode & stat.S_IWOTH:
        raise CheckpointError(folder, "can be changed by every user of this machine: if you trust it, run chmod o-w")


def check_sizes(folder: Path, manifest: Manifest) -> None:
    for name, file in manifest.files.items():
        path = folder / name
        try:
            found = os.lstat(path)
        except OSError as error:
            reason = "is missing" if isinstance(error, FileNotFoundError) else str(error.strerror)
            raise CheckpointError(path, reason) from error
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(path, "is not a regular file")
        if found.st_size != file.size:
            raise CheckpointError(path, f"has {found.st_size} bytes instead of {file.size}: it was cut off or changed")


def check_hashes(folder: Path, manifest: Manifest, *, share: int, shares: int) -> None:
    """Hash one share of the files, the largest first; nothing large is allocated."""
    load = [0] * shares
    for name in sorted(manifest.files, key=lambda n: (-manifest.files[n].size, n)):
        mine = load.index(min(load))
        load[mine] += manifest.files[name].size + 1
        if mine == share:
            _check_hash(folder / name, manifest.files[name])


def _check_hash(path: Path, file: File) -> None:
    with open_file(path) as content:
        try:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    if found != file.sha256:
        raise CheckpointError(path, "does not have the hash in manifest.json: it was changed or damaged")


Document = TypeVar("Document", bound=Strict)


def parsed(kind: type[Document], folder: Path, name: str) -> Document:
    """A JSON file of the folder, whose hash must have been checked."""
    path = folder / name
    return checked(kind, path, _json(path, _content(path, MAX_JSON)))


def checked(kind: type[Document], path: Path, raw: Any) -> Document:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))[:200]
        raise CheckpointError(path, f"is not valid: {place}: {first['msg']}") from error


def _json(path: Path, content: bytes) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a number")

    try:
        return json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not JSON: {error}") from error


def _content(path: Path, limit: int) -> bytes:
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(path, f"has {size} bytes, more than the {limit} that such a file can have")
        return file.read(limit + 1)
