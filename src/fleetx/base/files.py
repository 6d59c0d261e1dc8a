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
    """Write to the path that this yields; `path` gets its content when the block ends without an error.

    The temporary file is in the same folder, so the rename never crosses file systems, and its name is random, so that
    several ranks, also on hosts that share the folder, can write the same file.
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
    """Fill the folder that this yields; it replaces `path` when the block ends without an error."""
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
    """Rename a folder, in place of an old one if there is one, which steps aside first. One of them is always whole."""
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
    """Where a folder is while another one takes its place; a process that is killed then leaves it there."""
    return folder.with_name(f".{folder.name}{REPLACED}")


def sync(path: Path) -> None:
    """Of a file its content, of a folder its names. Without this, a power cut can leave an empty file under a new name.

    An error names the path, which os.fsync does not know.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(handle)
