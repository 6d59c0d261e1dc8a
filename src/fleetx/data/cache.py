"""A cache of parsed data on disk. It is memory-mapped, so that all processes of a machine share one copy."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fleetx.base.files import atomic_folder
from fleetx.data.bert_lines import Corpus
from fleetx.data.checks import RecordErrors

_VERSION = 3  # of the format


def load_or_create(folder: Path, paths: list[Path], settings: tuple[object, ...], errors: RecordErrors,
                   read: Callable[[RecordErrors], Corpus]) -> Corpus:  # fmt: skip
    """Return the result of `read` for these files and settings, from the cache if it is there.

    Only one process reads; the others wait for it. The cache may be in the data folder, because loaders ignore folders
    and hidden files.
    """
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    name = hashlib.sha256(repr((_VERSION, files, settings)).encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, even if the process dies
        entry = folder / name
        if not entry.is_dir():
            skipped = RecordErrors("skip")  # other loaders may skip what this one raises
            _write(read(skipped), skipped.messages, entry)
    errors.add(*json.loads((entry / "invalid.json").read_text()))
    return Corpus(*(np.load(entry / f"{name}.npy", mmap_mode="r") for name in Corpus._fields))


def _write(corpus: Corpus, invalid: list[str], entry: Path) -> None:
    with atomic_folder(entry) as temporary:
        for name, values in corpus._asdict().items():
            np.save(temporary / f"{name}.npy", values, allow_pickle=False)
        (temporary / "invalid.json").write_text(json.dumps(invalid))
