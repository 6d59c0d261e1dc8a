"""Parse filelist.txt (a name and its md5 per line) and meta.txt (a name per line)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from fleetx.errors import DownloadError

FILELIST, META = "filelist.txt", "meta.txt"
RECORDS = ".fleetx-download"  # fleetx's own folder inside the local one: downloads must not write to it


@dataclass(frozen=True)
class ListedFile:
    """One file of filelist.txt."""

    name: str
    md5: str

    @property
    def is_tar(self) -> bool:
        return self.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"))


def check_inside(name: str, *, where: str) -> str:
    """Return the normalized name, or raise an error if it leaves the folder. `where` is the source of the name."""
    path = PurePosixPath(name)
    if any(unicodedata.category(c) == "Cc" for c in name):
        raise DownloadError(f"{where}: the name {name!r} has control characters; rename the file")
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise DownloadError(f"{where}: the name {name!r} leaves the folder; names must be relative and without '..'")
    if RECORDS in path.parts:
        raise DownloadError(f"{where}: the name {name!r} is in {RECORDS}, where fleetx keeps its own records")
    return str(path)


def read_filelist(text: str, where: str) -> list[ListedFile]:
    sums: dict[str, str] = {}
    for line, at in _lines(text, where):
        match = re.fullmatch(r"(.*\S)\s+([0-9a-fA-F]{32})", line)
        if not match:
            raise DownloadError(f"{at}: {line!r} must be a name and its md5, such as 'a.tar {'0' * 32}'")
        name, md5 = check_inside(match[1], where=at), match[2].lower()
        if sums.setdefault(name, md5) != md5:
            raise DownloadError(f"{at}: {name!r} is listed twice with different sums, {sums[name]} and {md5}")
    return [ListedFile(name, md5) for name, md5 in sums.items()]


def read_meta(text: str, where: str) -> list[str]:
    names = dict.fromkeys(check_inside(line, where=at) for line, at in _lines(text, where))
    return [name for name in names if name not in (FILELIST, META)]


def check_distinct(names: Iterable[str]) -> None:
    """Raise an error if two names differ only in case or Unicode form: on many file systems they are one file."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other != name:
            raise DownloadError(
                f"{other!r} and {name!r} differ only in case or Unicode form, so they are one file on many file "
                "systems: rename one of them"
            )


def _lines(text: str, where: str) -> list[tuple[str, str]]:
    """Return each line that is not empty, and where it is."""
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return [(line, f"{where}, line {number}") for number, line in lines if line]


def shard(files: Sequence[ListedFile], *, shard_id: int, shard_num: int) -> Sequence[ListedFile]:
    """Every `shard_num`-th file, starting at number `shard_id`; all files if `shard_num` is -1."""
    if shard_num < 0:
        return files
    if shard_id >= len(files):
        raise DownloadError(
            f"shard_id={shard_id} of shard_num={shard_num} would get no file, because {FILELIST} lists "
            f"{len(files)}: use at most {len(files)} shards"
        )
    return files[shard_id::shard_num]
