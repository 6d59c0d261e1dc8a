"""The old system's downloader: a yaml says where the data is, the call brings it here and returns where."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path, PurePosixPath

from fleetx.errors import DownloadError, UsageError
from fleetx.paddle.download import config
from fleetx.paddle.download.config import Address
from fleetx.paddle.download.fetch import Patience, Way, fetch_unchecked
from fleetx.paddle.download.folder import Folder
from fleetx.paddle.download.node import is_first_worker, once_per_node
from fleetx.paddle.download.records import Records
from fleetx.paddle.download.remote import apart, remote, without_secrets

_LONGEST_YAML = 1 << 20


class Downloader:
    """Brings the files that a remote filelist.txt and meta.txt name, and unpacks its tars.

    May be called by all workers of a node, before or after fleet.init: one of them works, the others wait for it.
    What is there already, with the right md5, is not fetched again; an interrupted download continues.
    """

    def __init__(self, *, patience: Patience = Patience()):  # noqa: B008  frozen
        self._patience = patience

    def download_from_bos(
        self,
        fs_yaml: str | PathLike[str],
        local_path: str = "./",
        shard_num: int = -1,
        shard_id: int = -1,
        process_num: int = 10,
    ) -> str:
        """From the folder `bos_path` of the yaml: http(s), or any address that fsspec knows. Returns local_path.

        `fs_yaml`: a .yaml or .yml file, or the address of one. With `shard_num`, only every shard_num-th file of
        filelist.txt, from number `shard_id` on. `process_num` files are fetched at once.
        """
        return self._download(fs_yaml, local_path, shard_num, shard_id, process_num, config.BOS_KEYS, config.bos)

    def download_from_hdfs(
        self,
        fs_yaml: str | PathLike[str],
        local_path: str = "./",
        shard_num: int = -1,
        shard_id: int = -1,
        process_num: int = 10,
    ) -> str:
        """The same from Hadoop: `fs.default.name` and `data_path` of the yaml, as the user in `hadoop.job.ugi`."""
        return self._download(fs_yaml, local_path, shard_num, shard_id, process_num, config.HDFS_KEYS, config.hdfs)

    def _download(
        self,
        fs_yaml: str | PathLike[str],
        local_path: str,
        shard_num: int,
        shard_id: int,
        process_num: int,
        keys: tuple[str, ...],
        address: Callable[..., Address],
    ) -> str:
        fs_yaml = fspath(fs_yaml)
        _check(fs_yaml, shard_num, shard_id, process_num)
        local, first = Path(local_path), is_first_worker()
        shown = without_secrets(fs_yaml) if "://" in fs_yaml else fs_yaml

        def work() -> None:
            settings = self._settings(fs_yaml, Records(local), keys, shown=shown)
            source = remote(address(settings, shown=shown), timeout=self._patience.timeout)
            folder = Folder(local, source, patience=self._patience, width=process_num, bar=first)
            folder.fill(shard=shard_id, shards=shard_num)

        key = hashlib.sha256(json.dumps([keys, fs_yaml, shard_num, shard_id]).encode()).hexdigest()[:16]
        try:
            once_per_node(work, Records(local), key=key, task=f"downloads {shown} into {local}", first=first)
        except OSError as error:
            raise DownloadError(f"{local}: cannot be written: {error}") from error
        return local_path

    def _settings(self, fs_yaml: str, records: Records, keys: tuple[str, ...], *, shown: str) -> Mapping[str, str]:
        if "://" not in fs_yaml:
            return config.read(Path(fs_yaml), keys, shown=shown)

        def reached(name: str, size: int) -> None:
            if size > _LONGEST_YAML:
                raise DownloadError(f"{shown}: is longer than 1 MB, which no yaml with an address is")

        folder, name = apart(fs_yaml)
        source = remote(Address(folder), timeout=self._patience.timeout)
        way = Way(source, self._patience, threading.Event(), reached)
        copy = records.root / "fs.yaml"
        fetch_unchecked(way, name, records.part("fs.yaml"), copy)
        return config.read(copy, keys, shown=shown)


def _check(fs_yaml: str, shard_num: int, shard_id: int, process_num: int) -> None:
    if PurePosixPath(config.split(fs_yaml).path).suffix not in (".yaml", ".yml"):
        raise UsageError(f"fs_yaml={without_secrets(fs_yaml)!r}: must end in .yaml or .yml")
    for name, value in (("shard_num", shard_num), ("shard_id", shard_id), ("process_num", process_num)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{name}={value!r}: must be a whole number")
    if process_num < 1:
        raise UsageError(f"process_num={process_num}: must be at least 1")
    if shard_num < 1 and shard_num != -1:
        raise UsageError(f"shard_num={shard_num}: must be at least 1, or -1 for everything")
    if shard_num == -1 and shard_id != -1:
        raise UsageError(f"shard_id={shard_id}: says nothing without shard_num")
    if shard_num > 0 and not 0 <= shard_id < shard_num:
        raise UsageError(f"shard_id={shard_id}: must be from 0 to {shard_num - 1}, because shard_num={shard_num}")
