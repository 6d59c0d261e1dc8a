"""A remote folder, whatever serves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol
from urllib.parse import urlunsplit

from fleetx.paddle.download.config import Address, split
from fleetx.paddle.download.failure import Dropped


@dataclass(frozen=True)
class Reply:
    """One remote file, open at byte `start`. `total` is the length of the whole file, if the server tells."""

    take: Callable[[int], bytes]
    close: Callable[[], None]
    start: int
    total: int | None

    def read(self, most: int) -> bytes:
        try:
            return self.take(most)
        except Exception as error:  # each file system has errors of its own; the bounded tries end what does not heal
            raise Dropped(f"{type(error).__name__}: {error}") from error

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Remote(Protocol):
    """Files by their names relative to the folder. Errors: `Dropped` if another try may help, else DownloadError."""

    def shown(self, name: str) -> str:
        """The address of a file as it may be printed."""

    def open(self, name: str, *, start: int = 0) -> Reply:
        """The file from byte `start` on, or from 0 where the server cannot: `Reply.start` says which."""

    def length(self, name: str) -> int | None:
        """The length of the file, if the server tells; never an error."""


def remote(address: Address, *, timeout: float) -> Remote:
    """`timeout` seconds without a byte count as a dropped connection (http and https; fsspec has its own clocks)."""
    if split(address.url).scheme in ("http", "https"):
        from fleetx.paddle.download.web import Web

        return Web(address.url, timeout=timeout)
    from fleetx.paddle.download.filesystem import FileSystem

    return FileSystem(address)


def without_secrets(url: str) -> str:
    """The URL without user, password and query: signed addresses carry their key in the query."""
    parts = split(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def apart(url: str) -> tuple[str, str]:
    """The address of the folder, and the name in it; a query stays with the folder."""
    parts = split(url)
    folder, _, name = parts.path.rpartition("/")
    return urlunsplit(parts._replace(path=folder)), name
