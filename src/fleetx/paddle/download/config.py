"""Read the yaml file that says where the remote folder is and how to open it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from fleetx.base import yaml_file
from fleetx.base.suggest import did_you_mean
from fleetx.errors import DownloadError, StrategyError
from fleetx.paddle.download.progress import say

BOS_KEYS = ("bos_path",)
HDFS_KEYS = ("hadoop_home", "fs.default.name", "hadoop.job.ugi", "data_path", "java_home")


@dataclass(frozen=True)
class Address:
    """The URL of a folder and fsspec's options to open it, which may hold a password and are never shown."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


def read(path: Path, known: tuple[str, ...], *, shown: str) -> dict[str, str]:
    """Read the settings, checking keys and values. `shown` is the name of the file in messages."""
    try:
        data = yaml_file.read(path)
    except StrategyError as error:
        raise DownloadError(f"{shown}: {error}") from None
    except OSError as error:
        raise DownloadError(f"{shown}: {error.strerror}; fs_yaml must be a yaml file or the address of one") from None
    for key, value in data.items():
        if key not in known:
            hint = did_you_mean(key, known, cutoff=0.5, otherwise=f"the keys are {', '.join(known)}")
            raise DownloadError(f"{shown}: unknown key {key[:40]!r}: {hint}")
        if not isinstance(value, str) or not value.strip():
            # Only the type is shown: a few lines of yaml with aliases can expand to gigabytes.
            raise DownloadError(f"{shown}: {key} must be a non-empty string, not a {type(value).__name__}")
    return data


def split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # its message may contain a password
        plain = url.rpartition("@")[2].partition("?")[0]
        raise DownloadError(f"{plain}: not a valid address: check its host and port") from None


def bos(settings: Mapping[str, str], *, shown: str) -> Address:
    return Address(_required(settings, "bos_path", shown=shown))


def hdfs(settings: Mapping[str, str], *, shown: str) -> Address:
    """Join `fs.default.name` and `data_path`. `hadoop.job.ugi` is the user: "name" or "name,password"."""
    root, path = (_required(settings, key, shown=shown) for key in ("fs.default.name", "data_path"))
    if not path.startswith("/"):
        raise DownloadError(f"{shown}: data_path = {path!r}: must start with '/'")
    scheme = split(root).scheme
    user, _, password = settings.get("hadoop.job.ugi", "").partition(",")
    options: dict[str, Any] = {"user": user} if user else {}
    homes = [key for key in ("hadoop_home", "java_home") if key in settings]
    if scheme == "hdfs":
        _prepare_libhdfs(settings, shown=shown)
    elif homes:
        say(f"{shown}: ignoring {' and '.join(homes)}: {scheme}:// does not need Hadoop on this machine")
    if scheme == "swebhdfs":  # Hadoop's name for WebHDFS over https, which is an option in fsspec
        root, options = "web" + root.removeprefix("sweb"), {**options, "use_https": True}
        if password:
            options["password"] = password
    elif password:
        raise DownloadError(
            f"{shown}: {scheme}:// cannot send the password in hadoop.job.ugi safely: "
            "remove the password, or use swebhdfs://host:port in fs.default.name"
        )
    elif user and scheme not in ("hdfs", "webhdfs"):
        raise DownloadError(f"{shown}: hadoop.job.ugi has no effect on {scheme or 'a path without'}://; remove it")
    return Address(root.rstrip("/") + path, options)


def _prepare_libhdfs(settings: Mapping[str, str], *, shown: str) -> None:
    """libhdfs, which pyarrow loads, finds Hadoop and Java only through the environment."""
    if "CLASSPATH" not in os.environ:
        raise DownloadError(
            f"{shown}: hdfs:// needs Hadoop's Java classes: export CLASSPATH=$(hadoop classpath --glob) before the "
            "script starts, or use webhdfs://host:port in fs.default.name, which needs no Hadoop on this machine"
        )
    for key, variable in (("hadoop_home", "HADOOP_HOME"), ("java_home", "JAVA_HOME")):
        if key in settings:
            os.environ[variable] = settings[key]


def _required(settings: Mapping[str, str], key: str, *, shown: str) -> str:
    if key not in settings:
        raise DownloadError(f"{shown}: {key} is missing: it says where the data is")
    return settings[key].strip()
