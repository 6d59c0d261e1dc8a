"""Files in a remote folder: over HTTP with urllib, everything else (file, memory, hdfs, s3 ...) through fsspec."""

from __future__ import annotations

import base64
import http.client
import io
import ipaddress
import re
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib import request
from urllib.parse import quote, unquote, urljoin, urlunsplit

from fleetx.errors import DownloadError
from fleetx.paddle.download.config import Address, split

_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 10
_BUSY = (408, 425, 429)  # like 5xx, worth another attempt
_NOT_READABLE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class TransientError(Exception):
    """The connection failed, but another attempt may succeed. Never leaves this package."""


@dataclass(frozen=True)
class Reply:
    """A remote file opened at byte `start`. `total` is the length of the file, or None if the server does not say."""

    stream: Any
    start: int
    total: int | None

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes. read1 returns as soon as some arrive, so none are lost if the server stalls."""
        try:
            chunk: bytes = getattr(self.stream, "read1", self.stream.read)(size)
        except Exception as error:  # each file system has its own exceptions; the number of attempts is bounded
            raise TransientError(f"{type(error).__name__}: {error}") from error
        return chunk


def connect(address: Address, *, timeout: float) -> Web | FileSystem:
    """Open a remote folder. `timeout`: seconds without a byte, for HTTP only: fsspec's file systems have their own."""
    if split(address.url).scheme in ("http", "https"):
        return Web(address.url, timeout=timeout)
    return FileSystem(address)


def without_secrets(url: str) -> str:
    """Remove the user, the password and the query: signed addresses carry their key in the query."""
    parts = split(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def split_name(url: str) -> tuple[str, str]:
    """Split into the address of the folder, which keeps the query, and the name of the file."""
    parts = split(url)
    folder, _, name = parts.path.rpartition("/")
    return urlunsplit(parts._replace(path=folder)), name


# --- HTTP -----------------------------------------------------------------------------------------
class _AnyStatus(request.HTTPErrorProcessor):
    """Returns every response. By default, urllib raises errors, and follows redirects from https to http."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


class _Https(request.HTTPSHandler):
    """Loads the trusted certificates at the first https address, once for all files: it takes a tenth of a second."""

    def __init__(self) -> None:
        super().__init__(context=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))  # unused, but without one it would load them

    @cached_property
    def _trusted(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def https_open(self, req: request.Request) -> Any:
        return self.do_open(http.client.HTTPSConnection, req, context=self._trusted)


class Web:
    """A folder on a web server. The query of its address (such as a signature) is sent with every file."""

    def __init__(self, url: str, *, timeout: float):
        parts = split(url)
        credentials, _, host = parts.netloc.rpartition("@")
        self._parts = parts._replace(netloc=host, path=quote(parts.path.rstrip("/"), safe="/%"), fragment="")
        self._timeout, self._headers = timeout, {"User-Agent": "fleetx"}
        if credentials:
            self._headers["Authorization"] = f"Basic {base64.b64encode(unquote(credentials).encode()).decode()}"
        self._opener = request.build_opener(_Https(), _AnyStatus())

    def display(self, name: str) -> str:
        """Return the address of a file without secrets."""
        return without_secrets(self._url(name))

    def length(self, name: str) -> int | None:
        """Return the length of a file, or None if it cannot be determined: some servers do not support HEAD."""
        with suppress(Exception), self._send(name, method="HEAD") as response:
            return _length(response) if response.status == 200 else None
        return None

    def open(self, name: str, start: int = 0) -> Reply:
        """Open a file at byte `start`, or at 0 if the server cannot seek.

        Raises TransientError if another attempt may succeed, DownloadError otherwise.
        """
        try:
            response = self._send(name, start=start)
        except (ValueError, http.client.InvalidURL) as error:  # an impossible host or port
            raise DownloadError(f"{self.display(name)}: this address or a redirect is not valid: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise DownloadError(
                    f"{self.display(name)}: the server's certificate is not trusted ({reason.verify_message}); "
                    "if your own authority signed it, set SSL_CERT_FILE to that authority's certificate"
                ) from None
            raise TransientError(f"{type(reason).__name__}: {reason}") from error
        status, length = response.status, _length(response)
        if status == 200:
            return Reply(response, 0, length)
        if status == 206 and start and _first_byte(response) == start:
            return Reply(response, start, None if length is None else start + length)
        response.close()
        if status == 206 and start:  # a different range than requested
            return self.open(name)
        if status == 416 and start:  # nothing after `start`: the md5 tells whether the file is complete
            return Reply(io.BytesIO(), start, None)
        if status in _BUSY or status >= 500:
            raise TransientError(f"{status} {response.reason}")
        raise DownloadError(f"{self.display(name)}: the server answered {status} {response.reason}")

    def _send(self, name: str, *, start: int = 0, method: str = "GET") -> Any:
        url, headers = self._url(name), dict(self._headers)
        if start:
            headers["Range"] = f"bytes={start}-"
        for _ in range(_MAX_REDIRECTS):
            _check_host(url, self.display(name))
            response = self._opener.open(request.Request(url, headers=headers, method=method), timeout=self._timeout)
            target = response.headers.get("Location")
            if response.status not in _REDIRECTS or not target:
                return response
            response.close()
            allowed = ("https",) if url.startswith("https:") else ("http", "https")
            url = urljoin(url, target)
            if split(url).scheme not in allowed:
                raise DownloadError(
                    f"{self.display(name)}: redirects to {without_secrets(url)}, which is not {' or '.join(allowed)}"
                )
            headers.pop("Authorization", None)  # the password is for the first server only
        raise DownloadError(f"{self.display(name)}: more than {_MAX_REDIRECTS} redirects")

    def _url(self, name: str) -> str:
        return urlunsplit(self._parts._replace(path=f"{self._parts.path}/{quote(name)}"))


def _check_host(url: str, shown: str) -> None:
    """Raise an error for link-local addresses: clouds serve a machine's credentials there, and nobody serves data."""
    with suppress(ValueError):
        if ipaddress.ip_address(split(url).hostname or "").is_link_local:
            raise DownloadError(
                f"{shown}: leads to the link-local address {split(url).hostname}, which holds no data sets"
            )


def _length(response: Any) -> int | None:
    text = response.headers.get("Content-Length") or ""
    return int(text) if text.isdecimal() else None


def _first_byte(response: Any) -> int | None:
    match = re.match(r"\s*bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


# --- everything else ------------------------------------------------------------------------------
class FileSystem:
    """A folder that fsspec can open; its methods are those of `Web`."""

    def __init__(self, address: Address):
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self._address = without_secrets(address.url).rstrip("/")
        try:
            self._fs, root = url_to_fs(address.url, skip_instance_cache=True, **address.options)
        except (ImportError, ValueError, TypeError, OSError) as error:
            raise DownloadError(f"{self._address}: fsspec cannot open this address: {error}") from None
        self._root = root.rstrip("/")

    def display(self, name: str) -> str:
        return f"{self._address}/{name}"

    def length(self, name: str) -> int | None:
        with suppress(DownloadError, TransientError):
            return self._try(name, self._size)
        return None

    def open(self, name: str, start: int = 0) -> Reply:
        def open_at(path: str) -> Reply:
            total = self._size(path)
            first = start if total is None or start <= total else 0
            file = self._fs.open(path, "rb")
            file.seek(first)
            return Reply(file, first, total)

        return self._try(name, open_at)

    def _size(self, path: str) -> Any:
        return self._fs.info(path).get("size")

    def _try(self, name: str, act: Callable[[str], Any]) -> Any:
        try:
            return act(f"{self._root}/{name}")
        except _NOT_READABLE as error:
            raise DownloadError(
                f"{self.display(name)}: {type(error).__name__}: the file does not exist or cannot be read"
            ) from None
        except Exception as error:  # see Reply.read
            raise TransientError(f"{type(error).__name__}: {error}") from error


Remote = Web | FileSystem
