"""Unpack a tar into a temporary folder, checking every member first, then rename the files into place.

tarfile's data filter resolves links on disk, where a later link can change the meaning of an earlier one: in Python
3.11.7, 3.12.1 and 3.13.0 it accepts two links that together leave the folder. Here a link is judged by its text alone,
and no member may be behind a link.
"""

from __future__ import annotations

import filecmp
import lzma
import os
import posixpath
import stat
import tarfile
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from fleetx.errors import DownloadError
from fleetx.paddle.download.fetch import AbortedError, check_disk
from fleetx.paddle.download.listing import check_inside

ArchiveMember = int | str | None  # the size of a file, the target of a link, or None for a folder
Members = dict[str, ArchiveMember]

# A damaged archive with a correct md5 raises any of these, depending on where the damage is.
_DAMAGED = (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, OverflowError)

# Python 3.11.4 and newer want to be told which filter to use; older ones, such as Debian 12's, have none.
_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def unpack(tar: Path, temporary: Path, *, display: str, stop: threading.Event) -> Members:
    """Unpack into the new folder `temporary`. If one member leaves the folder, the whole tar is an error."""
    temporary.mkdir(parents=True)
    members: Members = {}
    try:
        with tarfile.open(tar) as archive:
            for member in archive:
                if stop.is_set():
                    raise AbortedError
                if not PurePosixPath(member.name).parts:  # `tar -C folder .` begins with the folder itself
                    continue
                name = _check(member, members, display=display)
                if member.isreg():
                    (temporary / name).unlink(missing_ok=True)  # in the tar twice: the later one wins
                    check_disk(temporary, member.size, f"{display}: {member.name!r} needs")
                _disarm(member)
                archive.extract(member, temporary, **_FILTER)
                members[name] = _on_disk(temporary / name)
    except _DAMAGED as error:
        raise DownloadError(f"{display}: cannot be unpacked: {type(error).__name__}: {error}") from error
    return members


def publish(temporary: Path, members: Members, folder: Path, *, owner: str, owners: dict[str, str]) -> None:
    """Rename what was unpacked into `folder`. `owners` maps each name to the tar or list that it came from."""
    for name, member in members.items():
        source, target = temporary / name, folder / name
        if not target.parent.resolve().is_relative_to(folder.resolve()):
            raise DownloadError(f"{owner}: the member {name!r} is behind a link in {folder} that leads out of it")
        if member is None:
            target.mkdir(parents=True, exist_ok=True)
            continue
        if isinstance(member, str) and target.parent.resolve() != folder.resolve() / PurePosixPath(name).parent:
            raise DownloadError(f"{owner}: the link {name!r} is behind a link of another tar, which is not allowed")
        other = owners.setdefault(name, owner)
        if other != owner and not _same(source, target):
            raise DownloadError(f"{owner} and {other} hold different files with the same name, {name!r}")
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)


def is_intact(folder: Path, members: Mapping[str, ArchiveMember]) -> bool:
    """Whether all members still exist, each file with its size."""
    try:
        return all(_on_disk(folder / name) == member for name, member in members.items())
    except OSError:
        return False


def _check(member: tarfile.TarInfo, members: Members, *, display: str) -> str:
    """Return the name of the member, or raise an error if unpacking it is not safe."""
    at = f"{display}: the member {member.name!r}"
    path = PurePosixPath(check_inside(member.name, where=display))
    name = str(path)
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise DownloadError(f"{at} is a special file, which is not allowed")
    if any(isinstance(members.get(str(parent)), str) for parent in path.parents):
        raise DownloadError(f"{at} is behind a link, which is not allowed")
    if name in members:
        before = members[name]
        if not (member.isreg() if isinstance(before, int) else member.isdir() and before is None):
            raise DownloadError(f"{at} appears twice in the tar, with different types")
    if member.issym():
        link = str(PurePosixPath(member.linkname))
        target = posixpath.normpath(posixpath.join(path.parent, link))
        if link != posixpath.normpath(link):  # `..` after the name of another link could lead anywhere
            raise DownloadError(f"{at} is a link to {member.linkname!r}: '..' is allowed only at its start")
        if target != ".":
            check_inside(target, where=f"{at} is a link")
    if member.islnk() and not isinstance(members.get(check_inside(member.linkname, where=at)), int):
        raise DownloadError(f"{at} is a hard link to {member.linkname!r}, which is not an earlier file of the tar")
    return name


def _disarm(member: tarfile.TarInfo) -> None:
    """Drop the owner, the setuid and setgid bits, and write permission for others."""
    kept = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    member.mode = (0o755 if member.isdir() else member.mode | 0o600) & kept
    member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""


def _on_disk(path: Path) -> ArchiveMember:
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        return os.readlink(path)
    return None if stat.S_ISDIR(info.st_mode) else info.st_size


def _same(one: Path, other: Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and os.readlink(one) == os.readlink(other)
    return other.is_file() and filecmp.cmp(one, other, shallow=False)
