"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPLACED = ".replaced"  # suffix of a folder that makes room for another one of the same name


@contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to; it replaces `path` when the block ends without an error.

    The temporary file is in the same folder, so the rename never crosses file systems. Its name is random, so several
    ranks can write the same file, even on different hosts that share the folder.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> None:
    """`Path.write_text` or `write_bytes` that a crash cannot leave half done."""
    with atomic(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder to fill; it replaces `path` when the block ends without an error."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        replace_folder(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def replace_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`, moving an existing `folder` aside first. One of the two is always complete."""
    aside = stepped_aside(folder)
    if os.path.lexists(folder):
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    try:
        new.rename(folder)
    except OSError:
        if os.path.lexists(aside):
            aside.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def stepped_aside(folder: Path) -> Path:
    """Where a folder is kept while another takes its place; a process killed at that moment leaves it there."""
    return folder.with_name(f".{folder.name}{REPLACED}")


def sync(path: Path) -> None:
    """Flush a file's content or a folder's entries to disk. Without this, a power cut can leave a renamed file empty.

    Errors name the path, which os.fsync does not know.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(handle)
