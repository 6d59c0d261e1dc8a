"""Every address that is not http(s), through fsspec: file://, memory://, hdfs://, webhdfs://, s3:// ..."""

from __future__ import annotations

from fleetx.errors import DownloadError
from fleetx.paddle.download.config import Address
from fleetx.paddle.download.failure import Dropped
from fleetx.paddle.download.remote import Reply, without_secrets

_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class FileSystem:
    """A folder that fsspec can open."""

    def __init__(self, address: Address):
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self._address = without_secrets(address.url).rstrip("/")
        try:
            self._fs, root = url_to_fs(address.url, skip_instance_cache=True, **address.options)
        except ImportError as error:
            raise DownloadError(f"{self._address}: a package is missing to open this address: {error}") from None
        except (ValueError, TypeError) as error:
            raise DownloadError(f"{self._address}: fsspec cannot open this address: {error}") from None
        except OSError as error:
            raise DownloadError(f"{self._address}: cannot be reached: {error}") from None
        self._root = root.rstrip("/")

    def shown(self, name: str) -> str:
        return f"{self._address}/{name}"

    def length(self, name: str) -> int | None:
        try:
            return self._length(name)
        except (DownloadError, Dropped):
            return None

    def open(self, name: str, *, start: int = 0) -> Reply:
        total = self._length(name)
        if total is not None and start > total:
            start = 0
        try:
            file = self._fs.open(f"{self._root}/{name}", "rb")
            file.seek(start)
        except _FINAL as error:
            raise self._final(name, error) from None
        except Exception as error:  # see Reply.read
            raise Dropped(f"{type(error).__name__}: {error}") from error
        return Reply(file.read, file.close, start, total)

    def _length(self, name: str) -> int | None:
        try:
            return self._fs.info(f"{self._root}/{name}").get("size")
        except _FINAL as error:
            raise self._final(name, error) from None
        except Exception as error:  # see Reply.read
            raise Dropped(f"{type(error).__name__}: {error}") from error

    def _final(self, name: str, error: Exception) -> DownloadError:
        return DownloadError(f"{self.shown(name)}: {type(error).__name__}, there is no such file or it may not be read")
