"""Lines that were read before, in a folder: mapped into memory, all workers of a machine share one copy of them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np

from fleetx.data.bert_lines import Lines
from fleetx.data.errors import Complaints

_VERSION = 2  # of what is stored


def kept(folder: Path, paths: list[Path], about: tuple[object, ...], complaints: Complaints,
         read: Callable[[Complaints], Lines]) -> Lines:  # fmt: skip
    """What `read` returns for these files, from the folder if it is there already; else it is put there.

    Processes that want the same wait for the one that came first. The folder may be that of the data, of which hidden
    files and folders are no part.
    """
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    name = hashlib.sha256(repr((_VERSION, files, about)).encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed, also by a process that dies
        where = folder / name
        if not where.is_dir():
            everything = Complaints("skip")  # another loader may skip where this one raises
            _write(read(everything), everything.found, where)
    for complaint in json.loads((where / "broken.json").read_text()):
        complaints.add(complaint)
    return Lines(**{field.name: np.load(where / f"{field.name}.npy", mmap_mode="r") for field in fields(Lines)})


def _write(lines: Lines, broken: list[str], where: Path) -> None:
    """Beside, then renamed: what has its name is complete."""
    beside = where.with_name(f"{where.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    for field in fields(Lines):
        np.save(beside / f"{field.name}.npy", getattr(lines, field.name), allow_pickle=False)
    (beside / "broken.json").write_text(json.dumps(broken))
    beside.rename(where)
