"""A file that is hashed while it is written, and on disk when it is closed.

A large file is written directly to disk (O_DIRECT), from its own buffer. Otherwise the kernel would allocate memory for
a copy of everything and write that back, which costs more than the rest of a save. If a file system does not support
direct writes, the file is written like any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

LARGE = 16 * 1024 * 1024  # bytes: files of this size or more are written directly
_PIECE = 8 * 1024 * 1024  # bytes that are written and hashed at a time
_AHEAD = 48  # pieces that may be written before they are hashed
_BLOCK = 4096  # bytes: direct writes begin and end at multiples of this, in memory and in the file
_DIRECT = getattr(os, "O_DIRECT", 0)


class Written(NamedTuple):
    """A file as it was written."""

    size: int
    sha256: str


class HashingFile:
    """A new file. Another thread hashes it. large: write it directly if possible."""

    def __init__(self, path: Path, *, large: bool = False):
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        self._sha = hashlib.sha256()
        self._size = 0
        self._buffer: mmap.mmap | None = None  # for direct writes
        self._filled = 0
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="fleetx-hash")
        self._pending: deque[Future[None]] = deque()
        if large and _DIRECT:
            with contextlib.suppress(OSError):
                self._set_direct(True)
                self._buffer = mmap.mmap(-1, _PIECE)

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            if len(self._pending) == _AHEAD:  # pieces that wait to be hashed may be copies, so limit them
                self._pending.popleft().result()
            self._pending.append(self._hasher.submit(self._sha.update, piece))
            if self._buffer is None:
                self._put(piece)
                _start_writeback(self._fd, self._size, len(piece))
            else:
                self._collect(piece)
            self._size += len(piece)

    def finish(self) -> Written:
        if self._buffer is not None:
            whole = self._filled // _BLOCK * _BLOCK
            left = memoryview(self._buffer)[: self._filled]
            self._put(left[:whole])
            self._set_direct(False)
            self._put(left[whole:])
        os.fsync(self._fd)
        while self._pending:
            self._pending.popleft().result()
        return Written(self._size, self._sha.hexdigest())

    def _collect(self, piece: memoryview) -> None:
        """Fill the buffer, and write it when it is full."""
        while len(piece):
            assert self._buffer is not None
            room = np.frombuffer(self._buffer, np.uint8)[self._filled : self._filled + len(piece)]
            np.copyto(room, np.frombuffer(piece[: len(room)], np.uint8))  # releases the GIL
            self._filled, piece = self._filled + len(room), piece[len(room) :]
            if self._filled == _PIECE:
                self._put(memoryview(self._buffer))
                self._filled = 0

    def _put(self, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            try:
                done += os.write(self._fd, piece[done:])
            except OSError as error:
                if error.errno != errno.EINVAL or not self._set_direct(False):
                    raise  # else the file system needs other blocks, or the last write stopped inside one

    def _set_direct(self, wanted: bool) -> bool:
        """Returns whether this changed anything."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        if bool(flags & _DIRECT) != wanted:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags ^ _DIRECT)
        return bool(flags & _DIRECT) != wanted

    def __enter__(self) -> HashingFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._hasher.shutdown()
        os.close(self._fd)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self._path)  # os.write and os.fsync do not know it


def _start_writeback(fd: int, start: int, size: int) -> None:
    """Start the disk while more is written and hashed, so that the fsync, which also reports failures, is short."""
    if _sync_file_range is not None and size == _PIECE:
        _sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(size), 2)  # SYNC_FILE_RANGE_WRITE


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
