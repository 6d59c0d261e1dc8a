"""`Downloader`: a yaml file says where the data is; the call downloads it and returns the local path."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path, PurePosixPath
from typing import ClassVar

from fleetx.errors import DownloadError, UsageError
from fleetx.paddle.download import config
from fleetx.paddle.download.config import Address
from fleetx.paddle.download.fetch import Fetcher, Patience
from fleetx.paddle.download.folder import Folder
from fleetx.paddle.download.listing import RECORDS
from fleetx.paddle.download.node import is_first_worker, once_per_node, with_all_workers
from fleetx.paddle.download.remote import connect, split_name, without_secrets

_LONGEST_YAML = 1 << 20
_SITE = "https://fleet.bj.bcebos.com"
YamlPath = str | PathLike[str]


class Downloader:
    """Downloads the files listed in filelist.txt and meta.txt of a remote folder, and unpacks the tars.

    All workers of a node may call it, before or after fleet.init: one of them downloads, the others wait for it. Files
    that already exist with the right md5 are not downloaded again; an interrupted download is resumed.
    """

    def __init__(self, *, patience: Patience = Patience()):  # noqa: B008  frozen
        self._patience = patience

    def download_from_bos(
        self,
        fs_yaml: YamlPath | None = None,
        local_path: str = "./",
        shard_num: int = -1,
        shard_id: int = -1,
        process_num: int = 10,
    ) -> str:
        """Download from `bos_path` of the yaml: http(s), or any address that fsspec can open. Returns local_path.

        `fs_yaml`: a .yaml or .yml file, or the address of one. With `shard_num`, download only every shard_num-th
        file of filelist.txt, starting at number `shard_id`. Every worker must then call this, and it returns when all
        workers have their files. `process_num`: how many files to download at once.
        """
        return self._download(fs_yaml, local_path, shard_num, shard_id, process_num, config.BOS_KEYS, config.bos)

    def download_from_hdfs(
        self,
        fs_yaml: YamlPath | None = None,
        local_path: str = "./",
        shard_num: int = -1,
        shard_id: int = -1,
        process_num: int = 10,
    ) -> str:
        """Download from Hadoop: `fs.default.name` and `data_path` of the yaml, as the user in `hadoop.job.ugi`."""
        return self._download(fs_yaml, local_path, shard_num, shard_id, process_num, config.HDFS_KEYS, config.hdfs)

    def _download(
        self,
        fs_yaml: YamlPath | None,
        local_path: str,
        shard_num: int,
        shard_id: int,
        process_num: int,
        keys: tuple[str, ...],
        address: Callable[..., Address],
    ) -> str:
        if not isinstance(fs_yaml, str | PathLike):
            raise UsageError(
                f"fs_yaml={fs_yaml!r}: must be the yaml file that says where the data is; a script that takes it from "
                "parse_train_configs() needs the argument --download_config FILE"
            )
        fs_yaml = fspath(fs_yaml)
        _check(fs_yaml, shard_num, shard_id, process_num)
        local, first = Path(local_path), is_first_worker()
        shown = without_secrets(fs_yaml) if "://" in fs_yaml else fs_yaml

        def work() -> None:
            path = self._fetch_yaml(fs_yaml, local / RECORDS, shown=shown) if "://" in fs_yaml else Path(fs_yaml)
            source = address(config.read(path, keys, shown=shown), shown=shown)
            remote = connect(source, timeout=self._patience.timeout)
            folder = Folder(local, remote, patience=self._patience, threads=process_num, bar=first)
            folder.fill(shard_id=shard_id, shard_num=shard_num)

        key = hashlib.sha256(json.dumps([keys, fs_yaml, shard_num, shard_id]).encode()).hexdigest()[:16]

        def call() -> None:
            try:
                once_per_node(work, local / RECORDS, key=key, task=f"is downloading {shown} into {local}", first=first)
            except OSError as error:
                raise DownloadError(f"{local}: cannot be written: {error}") from error

        with_all_workers(call) if shard_num > 0 else call()
        return local_path

    def _fetch_yaml(self, url: str, private: Path, *, shown: str) -> Path:
        def check_length(name: str, size: int) -> None:
            if size > _LONGEST_YAML:
                raise DownloadError(f"{shown}: longer than 1 MiB: this is not a yaml file with an address")

        folder, name = split_name(url)
        remote = connect(Address(folder), timeout=self._patience.timeout)
        path = private / "fs.yaml"
        Fetcher(remote, self._patience, threading.Event(), check_length).fetch(name, private / "fs.yaml.part", path)
        return path


def _check(fs_yaml: str, shard_num: int, shard_id: int, process_num: int) -> None:
    if PurePosixPath(config.split(fs_yaml).path).suffix not in (".yaml", ".yml"):
        raise UsageError(f"fs_yaml={without_secrets(fs_yaml)!r}: must end in .yaml or .yml")
    for name, value in (("shard_num", shard_num), ("shard_id", shard_id), ("process_num", process_num)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{name}={value!r}: must be an integer")
    if process_num < 1:
        raise UsageError(f"process_num={process_num}: must be at least 1")
    if shard_num < 1 and shard_num != -1:
        raise UsageError(f"shard_num={shard_num}: must be at least 1, or -1 for all files")
    if shard_num == -1 and shard_id != -1:
        raise UsageError(f"shard_id={shard_id}: has no effect without shard_num; set both, or neither")
    if shard_num > 0 and not 0 <= shard_id < shard_num:
        raise UsageError(f"shard_id={shard_id}: must be from 0 to {shard_num - 1}, because shard_num={shard_num}")


# --- the downloaders of FleetX before September 2020, each for one data set --------------------------
class _NamedDownloader(Downloader):
    """Downloads one data set: from FleetX's site, or from Hadoop."""

    example: ClassVar[str]

    def __init__(self, fs_yaml: YamlPath | None = None):
        super().__init__()
        self._fs_yaml = fs_yaml

    def download_from_bos(self, local_path: str = "./") -> str:  # type: ignore[override]
        """Download what the yaml passed to the constructor names, or FleetX's example of this data set."""
        return super().download_from_bos(self._fs_yaml or f"{_SITE}/{self.example}", local_path)

    def download_from_hdfs(  # type: ignore[override]
        self, fs_yaml: YamlPath | None = None, local_path: str = "./", hdfs_path: None = None
    ) -> str:
        if hdfs_path is not None:
            raise UsageError(f"hdfs_path = {hdfs_path!r}: write it into the yaml file, as data_path")
        return super().download_from_hdfs(fs_yaml or self._fs_yaml, local_path)


class ImageNetDownloader(_NamedDownloader):
    example = "test/loader/small_imagenet.yaml"


class WikiDataDownloader(_NamedDownloader):
    example = "small_datasets/yaml_example/wiki_cn.yaml"


class WMTDataDownloader(_NamedDownloader):
    example = "small_datasets/yaml_example/wmt.yaml"
