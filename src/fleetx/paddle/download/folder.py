"""Make a local folder match a remote one: check what exists, download what is missing, unpack the tars."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from fleetx.errors import DownloadError
from fleetx.paddle.download import listing
from fleetx.paddle.download.fetch import AbortedError, Fetcher, Patience, check_disk, md5_of
from fleetx.paddle.download.listing import FILELIST, META, RECORDS, ListedFile
from fleetx.paddle.download.node import read_record, write_record
from fleetx.paddle.download.progress import Progress, say
from fleetx.paddle.download.remote import Remote
from fleetx.paddle.download.unpack import is_intact, publish, unpack

In = TypeVar("In")
Out = TypeVar("Out")
_GRACE = 2.0  # seconds to wait for threads after Ctrl-C; a thread that is blocked on a server is left behind


class Task(NamedTuple):
    """What is left to do for a file."""

    file: ListedFile
    download: bool
    unpack: bool


class Folder:
    """One run, in the process that holds the folder's lock."""

    def __init__(self, local: Path, remote: Remote, *, patience: Patience, threads: int, bar: bool):
        self._local, self._threads, self._bar = local, threads, bar
        self._private = local / RECORDS
        self._stop = threading.Event()
        self._fetcher = Fetcher(remote, patience, self._stop)
        self._owners: dict[str, str] = {}  # maps each name to the list or tar that it came from
        self._publishing = threading.Lock()

    def fill(self, *, shard_id: int, shard_num: int) -> None:
        """Download one shard of the files; all of them if `shard_num` is -1."""
        started = time.monotonic()
        shutil.rmtree(self._private / "unpacking", ignore_errors=True)  # left by an interrupted run
        everything = listing.read_filelist(*self._list(FILELIST))
        meta = listing.read_meta(*self._list(META))
        files = listing.shard(everything, shard_id=shard_id, shard_num=shard_num)
        listed = {file.name for file in files}
        listing.check_distinct([*(file.name for file in everything), *meta])
        meta = [name for name in meta if name not in listed]
        self._owners = dict.fromkeys([FILELIST, *listed], FILELIST) | dict.fromkeys([META, *meta], META)
        self._each(self._fetch_meta, meta, str)
        tasks = [task for task in self._each(self._check, files, lambda file: file.name) if task[1:] != (False, False)]
        if not tasks:
            return
        with Progress(files=len(tasks), size=self._check_disk(tasks), bar=self._bar) as progress:
            self._fetcher = replace(self._fetcher, on_bytes=progress.on_bytes)

            def run(task: Task) -> None:
                self._run(task)
                progress.on_file()

            self._each(run, tasks, _name)
        seconds = time.monotonic() - started
        say(f"{len(files)} files are in {self._local}; {len(tasks)} were downloaded or unpacked in {seconds:.1f} s")

    def _list(self, name: str) -> tuple[str, str]:
        """Download a list; return its text and its address."""
        address = self._fetcher.remote.display(name)
        try:
            self._fetch_meta(name)
            return (self._local / name).read_text(encoding="utf-8-sig"), address  # sig: Windows editors write a BOM
        except DownloadError as error:
            raise DownloadError(
                f"{error}; the remote folder must contain {FILELIST} and {META}", failed=[name]
            ) from None
        except UnicodeDecodeError:
            raise DownloadError(f"{address}: is not UTF-8 text", failed=[name]) from None

    def _fetch_meta(self, name: str) -> None:
        self._fetcher.fetch(name, self._part(name), self._target(name))

    def _target(self, name: str) -> Path:
        """Where a file belongs. Raises an error if an existing link leads out of the folder."""
        target = self._local / name
        if not target.parent.resolve().is_relative_to(self._local.resolve()):
            raise DownloadError(
                f"{target}: a link in {self._local} leads out of it; remove the link or choose another folder"
            )
        return target

    def _part(self, name: str, md5: str = "no-md5") -> Path:
        """Where to download a file to. Each md5 has its own path: a new version never resumes an old one."""
        return self._private / "parts" / name / md5

    def _record(self, file: ListedFile) -> Path:
        """Where to record what was unpacked."""
        return self._private / "unpacked" / f"{file.name}.json"

    def _check(self, file: ListedFile) -> Task:
        """Find out what is left to do. A tar that was deleted after it was unpacked is not downloaded again."""
        target, path = self._target(file.name), self._record(file)
        record = read_record(path) if file.is_tar else {}
        unpacked = record.get("md5") == file.md5 and is_intact(self._local, record["members"])
        if unpacked:
            self._owners |= dict.fromkeys(record["members"], file.name)
        if not target.exists() or (unpacked and record["stat"] == _stat(target)):
            download = not unpacked
        else:
            download = md5_of(target, self._stop) != file.md5
            if unpacked and not download:  # only the time stamp changed
                write_record(path, {**record, "stat": _stat(target)})
        return Task(file, download, unpack=file.is_tar and (download or not unpacked))

    def _run(self, task: Task) -> None:
        file, target = task.file, self._local / task.file.name
        if task.download:
            part = self._part(file.name, file.md5)
            self._fetcher.fetch(file.name, part, target, md5=file.md5)
            shutil.rmtree(part.parent)  # removes parts of other versions
        if task.unpack:
            self._unpack(file, target)

    def _unpack(self, file: ListedFile, target: Path) -> None:
        record = self._record(file)
        record.unlink(missing_ok=True)  # until the new one is written, the tar counts as not unpacked
        # A unique name: a thread that outlives an interruption deletes its own folder, not that of a later run.
        temporary = self._private / "unpacking" / uuid.uuid4().hex
        try:
            members = unpack(target, temporary, display=self._fetcher.remote.display(file.name), stop=self._stop)
            with self._publishing:
                if self._stop.is_set():  # another process may hold the folder's lock by now
                    raise AbortedError
                publish(temporary, members, self._local, owner=file.name, owners=self._owners)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        write_record(record, {"md5": file.md5, "stat": _stat(target), "members": members})

    def _check_disk(self, tasks: Sequence[Task]) -> int | None:
        """Raise an error if the disk is too small. Return the bytes to download, or None if a length is unknown."""
        missing = [task for task in tasks if task.download]
        told = self._each(lambda task: self._fetcher.remote.length(task.file.name), missing, _name)
        lengths = {task.file: length for task, length in zip(missing, told, strict=True) if length is not None}
        parts = [self._part(file.name, file.md5) for file in lengths]
        needed = sum(lengths.values()) - sum(part.stat().st_size for part in parts if part.exists())
        # The content of a tar is about as large as the tar itself, or larger if it is compressed.
        needed += sum(length for file, length in lengths.items() if file.is_tar)
        needed += sum((self._local / task.file.name).stat().st_size for task in tasks if not task.download)
        hint = ": free some space, or download fewer files with shard_num and shard_id"
        check_disk(self._local, needed, f"downloading and unpacking {len(tasks)} files needs", hint=hint)
        return sum(lengths.values()) if len(lengths) == len(missing) else None

    def _each(self, work: Callable[[In], Out], items: Sequence[In], name: Callable[[In], str]) -> list[Out]:
        """Call `work` for each item, in parallel. Failures are reported together, when all items are done."""
        results = _run_jobs(work, items, threads=self._threads, stop=self._stop)
        failed: dict[str, str] = {}
        for item, result in zip(items, results, strict=True):
            if isinstance(result, DownloadError | OSError):
                failed[name(item)] = str(result)
            elif isinstance(result, Exception):
                raise result
        if failed:
            lines = [f"{len(failed)} of {len(items)} files failed:", *failed.values()]
            raise DownloadError("\n  - ".join(lines) if len(failed) > 1 else lines[1], failed=list(failed))
        return [result for result in results if not isinstance(result, Exception)]


def _run_jobs(
    work: Callable[[In], Out], items: Sequence[In], *, threads: int, stop: threading.Event
) -> list[Out | Exception]:
    """Call `work` for each item, in threads that neither delay Ctrl-C nor keep the process alive.

    Return the results in order; the result of an item that failed is its exception.
    Not concurrent.futures: it joins its threads at exit, so Ctrl-C would wait for a stalled server.
    """
    results: dict[int, Out | Exception] = {}
    indices = iter(range(len(items)))

    def run() -> None:
        for index in indices:
            if stop.is_set():
                return
            try:
                results[index] = work(items[index])
            except Exception as error:  # the caller decides what to do with it
                results[index] = error

    workers = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, len(items)))]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException:
        stop.set()
        deadline = time.monotonic() + _GRACE
        for worker in filter(threading.Thread.is_alive, workers):
            worker.join(max(0.0, deadline - time.monotonic()))
        raise
    return [results[index] for index in range(len(items))]


def _name(task: Task) -> str:
    return task.file.name


def _stat(path: Path) -> list[int]:
    info = path.stat()
    return [info.st_size, info.st_mtime_ns]
