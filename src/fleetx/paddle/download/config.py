"""The yaml: which remote folder, and how to get in."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from fleetx.base import yaml_file
from fleetx.errors import DownloadError, StrategyError
from fleetx.paddle.download.progress import say

BOS_KEYS = ("bos_path",)
HDFS_KEYS = ("hadoop_home", "fs.default.name", "hadoop.job.ugi", "data_path", "java_home")


@dataclass(frozen=True)
class Address:
    """A folder: its URL, and what fsspec needs to open it. Options may hold a password: never shown."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


def read(path: Path, known: tuple[str, ...], *, shown: str) -> dict[str, str]:
    """The mapping in the file, with known keys and text values only; `shown` is how the user called the file."""
    try:
        data = yaml_file.read(path)
    except StrategyError as error:
        raise DownloadError(f"{shown}: {error}") from None
    except OSError as error:
        raise DownloadError(f"{shown}: {error.strerror}; fs_yaml must be a yaml file or the address of one") from None
    for key, value in data.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise DownloadError(f"{shown}: unknown key {key[:40]!r}: {hint}")
        if not isinstance(value, str) or not value.strip():
            # its kind alone: a few lines of yaml that refer to each other can unfold to gigabytes
            raise DownloadError(f"{shown}: {key} must be a text that is not empty, not a {type(value).__name__}")
    return data


def split(url: str) -> SplitResult:
    """The parts of an address."""
    try:
        return urlsplit(url)
    except ValueError:  # whose text may show a password
        plain = url.rpartition("@")[2].partition("?")[0]
        raise DownloadError(f"{plain}: cannot be read as an address: look at its host and port") from None


def bos(settings: Mapping[str, str], *, shown: str) -> Address:
    return Address(_needed(settings, "bos_path", shown=shown))


def hdfs(settings: Mapping[str, str], *, shown: str) -> Address:
    """`fs.default.name` + `data_path`, opened as the user in `hadoop.job.ugi` ("name" or "name,password")."""
    root, path = (_needed(settings, key, shown=shown) for key in ("fs.default.name", "data_path"))
    if not path.startswith("/"):
        raise DownloadError(f"{shown}: data_path must start with '/', {path!r} does not")
    scheme = split(root).scheme
    user, _, password = settings.get("hadoop.job.ugi", "").partition(",")
    options: dict[str, Any] = {"user": user} if user else {}
    homes = [key for key in ("hadoop_home", "java_home") if key in settings]
    if scheme == "hdfs":
        _prepare_libhdfs(settings, shown=shown)
    elif homes:
        say(f"{shown}: {' and '.join(homes)} mean nothing for {scheme}://, which needs no Hadoop on this machine")
    if scheme == "swebhdfs":  # Hadoop's name for WebHDFS over https, which fsspec knows as an option
        root, options = "web" + root.removeprefix("sweb"), {**options, "use_https": True}
        if password:
            options["password"] = password
    elif password:
        raise DownloadError(
            f"{shown}: {scheme}:// cannot send the password in hadoop.job.ugi safely: "
            "give the user's name alone, or write swebhdfs://host:port into fs.default.name"
        )
    elif user and scheme not in ("hdfs", "webhdfs"):
        raise DownloadError(f"{shown}: hadoop.job.ugi has no meaning for {scheme or 'a path without'}://; remove it")
    return Address(root.rstrip("/") + path, options)


def _prepare_libhdfs(settings: Mapping[str, str], *, shown: str) -> None:
    """libhdfs, which pyarrow loads, finds Hadoop and Java through the environment only."""
    if "CLASSPATH" not in os.environ:
        raise DownloadError(
            f"{shown}: hdfs:// needs Hadoop's Java classes: export CLASSPATH=$(hadoop classpath --glob) before the "
            "start, or write webhdfs://host:port into fs.default.name, which needs no Hadoop on this machine"
        )
    for key, variable in (("hadoop_home", "HADOOP_HOME"), ("java_home", "JAVA_HOME")):
        if key in settings:
            os.environ[variable] = settings[key]


def _needed(settings: Mapping[str, str], key: str, *, shown: str) -> str:
    if key not in settings:
        raise DownloadError(f"{shown}: {key} is missing; it says where the data is")
    return settings[key].strip()
