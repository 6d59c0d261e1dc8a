"""filelist.txt ("name md5" a line) and meta.txt (a name a line): what there is to bring."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from fleetx.errors import DownloadError

FILELIST, META = "filelist.txt", "meta.txt"
RECORDS = ".fleetx-download"  # the folder inside of the local one that belongs to fleetx: no name may enter it

_MD5 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Listed:
    """One file of filelist.txt."""

    name: str
    md5: str

    @property
    def is_tar(self) -> bool:
        return self.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"))


def inside(name: str, *, where: str) -> str:
    """The name, if it is a relative one that stays inside of the folder; `where` says who gave it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise DownloadError(f"{where}: the name {name!r} leaves the folder; names must be relative and without '..'")
    if RECORDS in path.parts:
        raise DownloadError(f"{where}: the name {name!r} enters {RECORDS}, which keeps fleetx's own records")
    return str(path)


def read_filelist(text: str, *, where: str) -> list[Listed]:
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        at = f"{where}, line {number}"
        name, _, md5 = line.strip().replace("\t", " ").rpartition(" ")
        name, md5 = name.strip(), md5.lower()
        if not name or not _MD5.fullmatch(md5):
            raise DownloadError(f"{at}: {line.strip()!r} must be a name and its md5, such as 'a.tar {'0' * 32}'")
        name = inside(name, where=at)
        if found.setdefault(name, md5) != md5:
            raise DownloadError(f"{at}: {name!r} is listed twice, with two sums, {found[name]} and {md5}")
    return [Listed(name, md5) for name, md5 in found.items()]


def read_meta(text: str, *, where: str) -> list[str]:
    names = [
        inside(line.strip(), where=f"{where}, line {number}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    ]
    return [name for name in dict.fromkeys(names) if name not in (FILELIST, META)]


def shard(files: Sequence[Listed], *, number: int, among: int) -> list[Listed]:
    """Every `among`-th file from `number` on; all files if `among` is -1."""
    if among < 0:
        return list(files)
    mine = list(files[number::among])
    if not mine:
        raise DownloadError(
            f"shard_id={number} of shard_num={among} would get no file: {FILELIST} lists {len(files)}; "
            f"use at most {len(files)} shards"
        )
    return mine
