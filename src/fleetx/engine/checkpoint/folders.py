"""The checkpoints under a root: which is the newest, which can be removed, and which run they belong to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from fleetx.base.files import REPLACED
from fleetx.comm.world import World
from fleetx.engine.checkpoint import manifest
from fleetx.engine.checkpoint.read import place_of, verify
from fleetx.engine.checkpoint.write import SAVING
from fleetx.errors import CheckpointError, UsageError

log = logging.getLogger(__name__)

STEPS = "step-??????????"  # the names of `of_step`


def of_step(root: Path, step: int) -> Path:
    return root / f"step-{step:010d}"


def candidates(root: Path) -> tuple[list[Path], list[str]]:
    """Folders that look like checkpoints, newest first, and why others cannot be used."""
    found, left_out = [], []
    there = [path for path in root.iterdir() if not path.name.endswith(SAVING)] if root.is_dir() else []
    for folder in sorted(set(map(_named, there))):
        place = place_of(folder)
        named = os.path.lexists(place / manifest.MANIFEST) and os.path.lexists(place / manifest.DIGEST)
        ours = named or (folder.match(STEPS) and place.is_dir())  # even if it lost its manifest
        if place.is_symlink() or not ours:
            continue
        status = os.lstat(place)
        try:
            if status.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
                raise CheckpointError(folder, "belongs to another user")
            found.append((manifest.read(place).progress, status.st_mtime_ns, folder))
        except CheckpointError as error:
            log.warning("%s is left out: %s", folder.name, error)
            left_out.append(str(error))
    return [folder for *_, folder in sorted(found, reverse=True)], left_out


def _named(path: Path) -> Path:
    """The path of a checkpoint, even if it had been moved aside for another one when its run was killed."""
    name = path.name[1:].removesuffix(REPLACED)
    return path.with_name(name) if name and path.name == f".{name}{REPLACED}" else path


def latest(root: Path, world: World) -> Path | None:
    """The newest checkpoint whose files are all as they were written. world: the ranks that share the work."""
    found, _ = candidates(root)
    for folder in found:
        try:
            verify(place_of(folder), world)
        except CheckpointError as error:
            say_bad(folder, error, last=folder == found[-1])
        else:
            return folder
    return None


def say_bad(folder: Path, error: CheckpointError, *, last: bool) -> None:
    follows = "and there is no older checkpoint" if last else "so an older checkpoint is tried"
    log.warning("%s cannot be used, %s: %s", folder.name, follows, error)


def try_out(root: Path) -> str:
    """Make a folder under the root, with a name that was never used, and return that name."""
    name = f".try.{uuid.uuid4().hex[:8]}{SAVING}"
    (root / name).mkdir()
    return name


def remove_unfinished(root: Path) -> None:
    """Remove what killed runs left behind. The root belongs to one run at a time."""
    for left in root.glob(f".*{SAVING}") if root.is_dir() else ():
        shutil.rmtree(left, ignore_errors=True)


def prune(root: Path, keep: int, bad: Collection[str]) -> None:
    """Remove the oldest checkpoints of `of_step`; damaged ones do not count, and stay until they are replaced."""
    mine = []
    for folder in root.glob(STEPS):
        if not folder.is_symlink() and folder.name not in bad:
            with contextlib.suppress(CheckpointError):
                mine.append((manifest.read(folder).progress, folder))
    for _, folder in sorted(mine)[:-keep]:
        gone = folder.with_name(f".{folder.name}.00000000{SAVING}")  # a half-removed folder must not look like one
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


# --- a root belongs to one run at a time: two would remove each other's checkpoints ------------------
# The kernel holds the claim, as a lock on the folder, and drops it when the process ends, however it ends. If the file
# system has no such locks, as on NFS, nothing is claimed.
PATIENCE = 10.0  # seconds for a run that is ending
_FolderId = tuple[int, int]
_held: dict[_FolderId, int] = {}  # claimed by this process: the open folder
_users: Counter[_FolderId] = Counter()


def claim(root: Path) -> _FolderId | None:
    """Claim a folder; raise an error if another process has claimed it. One process may claim it more than once."""
    handle = os.open(root, os.O_RDONLY)
    found = os.fstat(handle)
    folder = found.st_dev, found.st_ino
    if folder in _held:
        os.close(handle)
    elif _locked(handle, root):
        _held[folder] = handle
    else:
        os.close(handle)
        return None
    _users[folder] += 1
    return folder


def _locked(handle: int, root: Path) -> bool:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return False
        if time.monotonic() > end:
            os.close(handle)
            raise UsageError(
                f"another run is using the checkpoints in {root}, and two would remove each other's: choose another "
                "folder, or end that run first"
            )
        time.sleep(0.05)


def release(folder: _FolderId | None) -> None:
    if folder is None or folder not in _held:
        return
    _users[folder] -= 1
    if not _users[folder]:
        os.close(_held.pop(folder))


def _forget() -> None:
    """A forked child, such as a worker of a loader, must not hold what its parent has claimed."""
    for handle in _held.values():
        os.close(handle)
    _held.clear()
    _users.clear()


os.register_at_fork(after_in_child=_forget)
