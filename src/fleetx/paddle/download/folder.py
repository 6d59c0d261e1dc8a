"""A remote folder's files, in a local folder: looks at what is there, brings what is missing, unpacks it."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from fleetx.base.jobs import Jobs
from fleetx.errors import DownloadError
from fleetx.paddle.download import listing
from fleetx.paddle.download.failure import Stopped, refuse_if_full
from fleetx.paddle.download.fetch import Patience, Way, fetch_checked, fetch_unchecked, md5
from fleetx.paddle.download.listing import Listed
from fleetx.paddle.download.progress import Progress, say
from fleetx.paddle.download.records import Records
from fleetx.paddle.download.remote import Remote
from fleetx.paddle.download.unpack import intact, publish, unpack

In = TypeVar("In")
Out = TypeVar("Out")


class State(Enum):
    """Of one file of filelist.txt, here."""

    MISSING = "not here, or with another md5"
    PACKED = "here, to be unpacked"
    READY = "here, and unpacked if it is a tar"


class Folder:
    """One run of the work, by the one process that holds the folder's lock."""

    def __init__(self, local: Path, source: Remote, *, patience: Patience, width: int, bar: bool):
        self._local, self._width, self._bar = local, width, bar
        self._records = Records(local)
        self._stop = threading.Event()
        self._way = Way(source, patience, self._stop)
        self._owners: dict[str, str] = {}  # who brought a name: one of the lists, or a tar
        self._publishing = threading.Lock()

    def fill(self, *, shard: int, shards: int) -> None:
        """Bring shard number `shard` of `shards`; all of the folder if `shards` is -1."""
        began = time.monotonic()
        shutil.rmtree(self._records.beside, ignore_errors=True)  # interrupted unpackings: begun again
        files = listing.read_filelist(self._text(listing.FILELIST), where=self._way.remote.shown(listing.FILELIST))
        meta = listing.read_meta(self._text(listing.META), where=self._way.remote.shown(listing.META))
        files = listing.shard(files, number=shard, among=shards)
        sums = {file.name for file in files}
        meta = [name for name in meta if name not in sums]
        self._owners = dict.fromkeys([listing.FILELIST, *sums], listing.FILELIST)
        self._owners |= dict.fromkeys([listing.META, *meta], listing.META)
        self._each(self._bring_meta, meta, str)
        states = self._each(self._look, files, _name)
        todo = [(file, state) for file, state in zip(files, states, strict=True) if state is not State.READY]
        if not todo:
            return
        size = self._check_room(todo)
        with Progress(files=len(todo), size=size, bar=self._bar) as progress:
            self._way = replace(self._way, reached=progress.reached)

            def bring(item: tuple[Listed, State]) -> None:
                self._bring(*item)
                progress.done()

            self._each(bring, todo, lambda item: item[0].name)
        seconds = time.monotonic() - began
        say(f"{len(files)} files are in {self._local}, {len(todo)} of them brought or unpacked in {seconds:.1f} s")

    def _text(self, name: str) -> str:
        try:
            self._bring_meta(name)
            return (self._local / name).read_text(encoding="utf-8-sig")  # a Windows editor's mark is no name
        except DownloadError as error:
            both = f"{listing.FILELIST} and {listing.META}"
            raise DownloadError(f"{error}; the remote folder must hold {both}", failed=[name]) from None
        except UnicodeDecodeError:
            raise DownloadError(f"{self._way.remote.shown(name)}: is not UTF-8 text", failed=[name]) from None

    def _bring_meta(self, name: str) -> None:
        fetch_unchecked(self._way, name, self._records.part(name), self._local / name)

    def _look(self, file: Listed) -> State:
        target, at = self._local / file.name, self._records.unpacked(file)
        record = self._records.read(at) if file.is_tar else {}
        unpacked = record.get("md5") == file.md5 and intact(self._local, record["members"])
        if unpacked:
            self._owners.update(dict.fromkeys(record["members"], file.name))
        if not target.exists():  # who removes a tar after its unpacking does not want it again
            return State.READY if unpacked else State.MISSING
        if unpacked and record["stat"] == _stat(target):
            return State.READY
        if md5(target, stop=self._stop) != file.md5:
            return State.MISSING
        if unpacked:
            self._records.write(at, {**record, "stat": _stat(target)})
        return State.READY if unpacked or not file.is_tar else State.PACKED

    def _bring(self, file: Listed, state: State) -> None:
        target, at = self._local / file.name, self._records.unpacked(file)
        if state is State.MISSING:
            fetch_checked(self._way, file, self._records.part(file.name, file.md5), target)
            self._records.forget_parts(file.name)
        if not file.is_tar:
            return
        at.unlink(missing_ok=True)  # from here on, until the new record is written, it counts as not unpacked
        # Its own: a thread that an interruption has left behind removes this when it wakes, and no later one's.
        beside = self._records.beside / uuid.uuid4().hex
        try:
            members = unpack(target, beside, shown=self._way.remote.shown(file.name), stop=self._stop)
            with self._publishing:
                if self._stop.is_set():  # the lock may be another's by now
                    raise Stopped
                publish(beside, members, self._local, owner=file.name, owners=self._owners)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        self._records.write(at, {"md5": file.md5, "stat": _stat(target), "members": members})

    def _check_room(self, todo: Sequence[tuple[Listed, State]]) -> int | None:
        """The length of all that is missing, if the server tells it."""
        missing = [file for file, state in todo if state is State.MISSING]
        packed = [file for file, state in todo if state is State.PACKED]
        told = self._each(lambda file: self._way.remote.length(file.name), missing, _name)
        lengths = {file: length for file, length in zip(missing, told, strict=True) if length is not None}
        parts = [self._records.part(file.name, file.md5) for file in lengths]
        needed = sum(lengths.values()) - sum(part.stat().st_size for part in parts if part.exists())
        # what a tar holds is about as long as the tar itself, or longer if it is compressed
        needed += sum(length for file, length in lengths.items() if file.is_tar)
        needed += sum((self._local / file.name).stat().st_size for file in packed)
        hint = ": make room, or take fewer files with shard_num and shard_id"
        refuse_if_full(self._local, needed, f"{len(todo)} files, with their unpacking, need", hint=hint)
        return sum(lengths.values()) if len(lengths) == len(missing) else None

    def _each(self, work: Callable[[In], Out], items: Sequence[In], name: Callable[[In], str]) -> list[Out]:
        """`work` for all items, in parallel; those that failed are told together, when the others are done."""
        done: list[Out] = []
        failed: dict[str, str] = {}
        for item, result in zip(items, Jobs(work, items, width=self._width, stop=self._stop).results(), strict=True):
            if not isinstance(result, Exception):
                done.append(result)
            elif isinstance(result, DownloadError | OSError):
                failed[name(item)] = str(result)
            else:
                raise result
        if len(failed) == 1:
            raise DownloadError(*failed.values(), failed=list(failed))
        if failed:
            lines = "".join(f"\n  - {sentence}" for sentence in failed.values())
            raise DownloadError(f"{len(failed)} of {len(items)} files failed:{lines}", failed=list(failed))
        return done


def _name(file: Listed) -> str:
    return file.name


def _stat(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
