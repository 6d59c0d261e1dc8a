"""A file that is hashed while it is written: the same bytes and the same hash, whichever way they go to the disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random

import pytest

from fleetx.engine.checkpoint import hashing_file
from fleetx.engine.checkpoint.hashing_file import HashingFile

PIECE = 64 * 1024


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(hashing_file, "_PIECE", PIECE)


def written(path, parts, *, large):
    with HashingFile(path, large=large) as file:
        for part in parts:
            file.write(part)
        found = file.finish()
    content = b"".join(parts)
    assert path.read_bytes() == content
    assert (found.size, found.sha256) == (len(content), hashlib.sha256(content).hexdigest())


SIZES = [
    [],
    [0],
    [1],
    [4096],
    [PIECE],
    [PIECE - 1, 1],
    [PIECE + 1],
    [3 * PIECE + 4096],
    [5, 4 * PIECE, 7],
    [100_000] * 9,
]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_byte_arrives(tmp_path, sizes, large):
    draw = random.Random(0)
    written(tmp_path / "f", [draw.randbytes(size) for size in sizes], large=large)


def is_direct(fd):
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def offers_direct(folder):
    try:
        os.close(os.open(folder / "try", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_a_large_file_goes_to_the_disk_directly(tmp_path, monkeypatch):
    if not offers_direct(tmp_path):
        pytest.skip("this file system has no direct writes")
    seen, write = [], os.write

    def watched(fd, data):
        seen.append((is_direct(fd), len(data)))
        return write(fd, data)

    monkeypatch.setattr(os, "write", watched)
    written(tmp_path / "f", [bytes(2 * PIECE + 5000)], large=True)
    assert seen == [(True, PIECE), (True, PIECE), (True, 4096), (False, 904)]
    seen.clear()
    written(tmp_path / "g", [bytes(2 * PIECE)], large=False)
    assert seen == [(False, PIECE)] * 2


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_writes_that_stop_in_the_middle_are_continued(tmp_path, monkeypatch, share):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: max(1, int(len(data) * share))]))
    written(tmp_path / "f", [os.urandom(3 * PIECE + 123)], large=True)


def test_a_file_system_that_takes_the_flag_but_no_such_write_gets_another(tmp_path, monkeypatch):
    write = os.write

    def refusing(fd, data):
        if is_direct(fd):
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data)

    monkeypatch.setattr(os, "write", refusing)
    written(tmp_path / "f", [os.urandom(3 * PIECE + 123)], large=True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EINVAL])
@pytest.mark.parametrize("large", [False, True])
def test_a_failure_names_the_file(tmp_path, monkeypatch, code, large):
    def failing(fd, data):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(OSError, match=os.strerror(code)) as caught, HashingFile(tmp_path / "f", large=large) as file:
        file.write(bytes(2 * PIECE))
    assert caught.value.filename == str(tmp_path / "f")
