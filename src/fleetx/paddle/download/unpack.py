"""One tar: unpacked beside, every member checked first, then renamed into place file by file.

The rules for links are stricter than those of tarfile's data filter, which resolves them on the disk and was got
around by long chains of links: here a link is judged by its text alone, and nothing may lie behind a link.
"""

from __future__ import annotations

import filecmp
import lzma
import os
import stat
import tarfile
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from fleetx.errors import DownloadError
from fleetx.paddle.download.failure import Stopped, refuse_if_full
from fleetx.paddle.download.listing import inside

Member = int | str | None  # what a name stands for: a file of so many bytes, a link to so-and-so, a folder
Members = dict[str, Member]

# A stream whose md5 is right and whose content is not raises whatever the place that is broken was read by.
_BROKEN = (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, OverflowError)


def unpack(tar: Path, beside: Path, *, shown: str, stop: threading.Event) -> Members:
    """Everything in the tar, under `beside`; the whole tar is refused for one member that leaves the folder."""
    if not hasattr(tarfile, "data_filter"):
        raise DownloadError("unpacking needs tarfile's data filter: use Python 3.11.4 or newer")
    beside.mkdir(parents=True)
    members: Members = {}
    try:
        with tarfile.open(tar) as archive:
            for member in archive:
                if stop.is_set():
                    raise Stopped
                if PurePosixPath(member.name) == PurePosixPath("."):  # `tar -C folder .` begins with the folder itself
                    continue
                name = _judge(member, members, shown=shown)
                if member.isreg():
                    (beside / name).unlink(missing_ok=True)  # named twice: the later one counts, as with tar itself
                    refuse_if_full(beside, member.size, f"{shown}: {member.name!r} needs")
                archive.extract(member, beside, filter="data")
                members[name] = _seen(beside / name)
    except _BROKEN as error:
        raise DownloadError(f"{shown}: cannot be unpacked: {type(error).__name__}: {error}") from error
    return members


def publish(beside: Path, members: Members, folder: Path, *, owner: str, owners: dict[str, str]) -> None:
    """Rename what was unpacked into `folder`. `owners` says which tar brought a name: two may not disagree."""
    for name, what in members.items():
        here, there = beside / name, folder / name
        if what is None:
            there.mkdir(parents=True, exist_ok=True)
            continue
        if isinstance(what, str) and there.parent.resolve() != folder.resolve() / PurePosixPath(name).parent:
            raise DownloadError(f"{owner}: the link {name!r} would lie behind another link: refused")
        other = owners.setdefault(name, owner)
        if other != owner and not _same(here, there):
            raise DownloadError(f"{owner} and {other} hold different files under one name, {name!r}")
        there.parent.mkdir(parents=True, exist_ok=True)
        here.replace(there)


def intact(folder: Path, members: Mapping[str, Member]) -> bool:
    """Is all of it there still, each file with its size?"""
    try:
        return all(_seen(folder / name) == what for name, what in members.items())
    except OSError:
        return False


def _judge(member: tarfile.TarInfo, members: Members, *, shown: str) -> str:
    """The name of the member, if it may be unpacked."""
    name = inside(member.name, where=shown)
    at = f"{shown}: the member {member.name!r}"
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise DownloadError(f"{at} is a device, a pipe or the like: refused")
    path = PurePosixPath(name)
    if any(isinstance(members.get(str(parent)), str) for parent in path.parents):
        raise DownloadError(f"{at} lies behind a link: refused")
    known = members.get(name)
    if name in members and not (member.isreg() if isinstance(known, int) else member.isdir() and known is None):
        raise DownloadError(f"{at} is there twice, as two different things: refused")
    if member.issym():
        target = PurePosixPath(member.linkname)
        ups = [part == ".." for part in target.parts]
        # `..` only in front: behind the name of another link it could lead anywhere
        if target.is_absolute() or sum(ups) > len(path.parent.parts) or any(ups[sum(ups) :]):
            raise DownloadError(f"{at} is a link that leaves the folder, to {member.linkname!r}: refused")
        if rest := target.parts[sum(ups) :]:
            inside("/".join(rest), where=at)
    if member.islnk() and not isinstance(members.get(inside(member.linkname, where=at)), int):
        raise DownloadError(
            f"{at} is a hard link to {member.linkname!r}, which is no file of the tar before it: refused"
        )
    return name


def _seen(path: Path) -> Member:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return os.readlink(path)
    return None if stat.S_ISDIR(found.st_mode) else found.st_size


def _same(one: Path, other: Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and os.readlink(one) == os.readlink(other)
    return other.is_file() and filecmp.cmp(one, other, shallow=False)
