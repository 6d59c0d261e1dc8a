"""The downloaders of FleetX before September 2020, each for one data set."""

from __future__ import annotations

from typing import ClassVar

from fleetx.errors import UsageError
from fleetx.paddle.download.downloader import Downloader, YamlPath

SITE = "https://fleet.bj.bcebos.com"


class _NamedDownloader(Downloader):
    """Downloads one data set: from FleetX's site, or from Hadoop."""

    example: ClassVar[str]

    def __init__(self, fs_yaml: YamlPath | None = None):
        super().__init__()
        self._fs_yaml = fs_yaml

    def download_from_bos(self, local_path: str = "./") -> str:  # type: ignore[override]
        """Download FleetX's example of this data set, or what the yaml of the constructor names."""
        return super().download_from_bos(self._fs_yaml or f"{SITE}/{self.example}", local_path)

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
