"""The checkpoints under a root belong to one run at a time: two would remove each other's.

The kernel holds the claim, as a lock of the folder, and drops it when the process ends, however it ends. Where the file
system has no such locks, as NFS, nothing is claimed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections import Counter
from pathlib import Path

from fleetx.errors import UsageError

PATIENCE = 10.0  # seconds for a run that is ending
_Folder = tuple[int, int]
_held: dict[_Folder, int] = {}  # of this process: the open folder
_users: Counter[_Folder] = Counter()


def claim(root: Path) -> _Folder | None:
    """Raise an error if another process has claimed this folder. One process may do so more than once."""
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
                f"another run uses the checkpoints in {root}, and two would remove each other's: choose another "
                "folder, or end that run first"
            )
        time.sleep(0.05)


def release(folder: _Folder | None) -> None:
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
