"""http and https, by the standard library: it checks certificates and host names, and ranges need two headers."""

from __future__ import annotations

import base64
import http.client
import io
import re
import ssl
from typing import IO, Any
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlunsplit

from fleetx.errors import DownloadError
from fleetx.paddle.download.config import split
from fleetx.paddle.download.failure import Dropped
from fleetx.paddle.download.remote import Reply, without_secrets

_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")
_NO_ADDRESS = (ValueError, http.client.InvalidURL)  # a host or port that cannot be; UnicodeError is a ValueError
_PASSING = (408, 425, 429)  # what a busy server says; like 5xx, worth another try


class _SameSafety(request.HTTPRedirectHandler):
    """Follows a redirection, but never from https to something that is not."""

    def redirect_request(
        self, req: request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> request.Request | None:
        schemes = ("https",) if req.type == "https" else ("http", "https")
        if split(newurl).scheme not in schemes:
            fp.close()
            raise DownloadError(
                f"{without_secrets(req.full_url)} redirects to {without_secrets(newurl)}, which is not "
                f"{' or '.join(schemes)}: refused"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def http_error_302(
        self, req: request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
    ) -> Any:
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except ValueError:  # the new address is none, and the answer is still open
            fp.close()
            raise

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class Web:
    """A folder on a web server; a query in its address (a signature, say) is sent with every file."""

    def __init__(self, url: str, *, timeout: float):
        parts = split(url)
        self._credentials, _, host = parts.netloc.rpartition("@")
        self._parts = parts._replace(netloc=host, path=quote(parts.path.rstrip("/"), safe="/%"), fragment="")
        self._timeout = timeout
        checked = request.HTTPSHandler(context=ssl.create_default_context())
        self._opener = request.build_opener(checked, _SameSafety())

    def shown(self, name: str) -> str:
        return without_secrets(self._url(name))

    def length(self, name: str) -> int | None:
        try:
            with self._send(name, method="HEAD") as answer:
                return _number(answer.headers.get("Content-Length"))
        except HTTPError as error:  # some servers refuse HEAD: the length is then checked when the file is asked for
            error.close()
        except (DownloadError, OSError, http.client.HTTPException, ValueError):
            pass
        return None

    def open(self, name: str, *, start: int = 0) -> Reply:
        try:
            answer = self._send(name, start=start)
        except HTTPError as error:
            with error:
                return self._refused(name, start, error)
        except URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise DownloadError(
                    f"{self.shown(name)}: the server's certificate is not trusted ({error.reason.verify_message}); "
                    "if it is your own authority's, point SSL_CERT_FILE to that authority's certificate"
                ) from None
            raise Dropped(str(error.reason)) from error
        except _NO_ADDRESS as error:
            raise DownloadError(
                f"{self.shown(name)}: is no address that can be opened, or redirects to one that is not: {error}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise Dropped(f"{type(error).__name__}: {error}") from error
        first, total = 0, _number(answer.headers.get("Content-Length"))
        if answer.status == 206 and start:
            first, total = _range(answer.headers.get("Content-Range"))
            if first != start:  # some other part than the one asked for
                answer.close()
                return self.open(name)
        elif answer.status != 200:
            answer.close()
            raise DownloadError(f"{self.shown(name)}: the server answered {answer.status} {answer.reason}")
        return Reply(answer.read1, answer.close, first, total)

    def _refused(self, name: str, start: int, error: HTTPError) -> Reply:
        if error.code == 416 and start:  # nothing at `start` or after: all of it is here, or more than there is
            _, total = _range(error.headers.get("Content-Range"))
            if total == start:
                return Reply(io.BytesIO().read, lambda: None, start, total)
            return self.open(name)
        if error.code in _PASSING or error.code >= 500:
            raise Dropped(f"{error.code} {error.reason}")
        raise DownloadError(f"{self.shown(name)}: the server answered {error.code} {error.reason}")

    def _send(self, name: str, *, start: int = 0, method: str = "GET") -> Any:
        asked = request.Request(self._url(name), method=method, headers={"User-Agent": "fleetx"})
        if start:
            asked.add_header("Range", f"bytes={start}-")
        if self._credentials:  # not sent on to where a redirection leads
            basic = base64.b64encode(unquote(self._credentials).encode()).decode()
            asked.add_unredirected_header("Authorization", f"Basic {basic}")
        return self._opener.open(asked, timeout=self._timeout)

    def _url(self, name: str) -> str:
        return urlunsplit(self._parts._replace(path=f"{self._parts.path}/{quote(name)}"))


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _range(text: str | None) -> tuple[int, int | None]:
    """First byte and whole length in a Content-Range; -1 for a first byte that is not told."""
    found = _RANGE.fullmatch((text or "").strip())
    if not found:
        return -1, None
    return int(found[1] or -1), _number(found[2])
