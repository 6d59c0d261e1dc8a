"""An HTTP server on loopback that misbehaves on request and records what it is asked for."""

from __future__ import annotations

import hashlib
import io
import ssl
import tarfile
import threading
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    start: int | None  # of the range, if one was asked for


class Server:
    """`files` by path. `faults[path]` is a list; each GET of the path takes the first fault:

    ("drop", n)       announce the right length, send n bytes, close the connection
    ("status", code)  answer with this status
    ("bytes", data)   send these bytes instead, with their own length
    ("elsewhere",)    send a different range than requested
    ("redirect", url)
    ("hold", n)       send n bytes, then nothing until `release` is set
    ("meet",)         answer when three such requests are open at once
    """

    def __init__(self, *, certificate=None):
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[tuple]] = defaultdict(list)
        self.ranges, self.heads, self.lengths = True, True, True
        self.asked: list[Asked] = []
        self.credentials: list[tuple[str, str | None]] = []  # path and what came with it
        self.barrier = threading.Barrier(3)
        self.held, self.release = threading.Event(), threading.Event()
        server = self

        class Answers(_Answers):
            told = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._http.daemon_threads = True
        scheme = "http"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True, do_handshake_on_connect=False)
            scheme = "https"
        self._http.handle_error = lambda *_: None  # dropped connections are what the tests are about
        self.url = f"{scheme}://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self):
        self.release.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)

    def got(self, name):
        """Where the GETs of one path began; None for a whole file."""
        return [a.start for a in self.asked if a.method == "GET" and a.path == f"/{name}"]

    def publish(self, files, *, meta=None, folder="set"):
        """Files with their sums in filelist.txt, meta files in meta.txt; the folder's address."""
        meta = {"train.txt": b"train/a 0\n"} if meta is None else meta
        self.files |= {f"/{folder}/{name}": data for name, data in (files | meta).items()}
        self.files[f"/{folder}/filelist.txt"] = filelist(files)
        self.files[f"/{folder}/meta.txt"] = "".join(f"{name}\n" for name in meta).encode()
        return f"{self.url}/{folder}"


class _Answers(BaseHTTPRequestHandler):
    told: Server
    timeout = 20

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        path = unquote(self.path.partition("?")[0])
        self.told.asked.append(Asked("HEAD", path, None))
        data = self.told.files.get(path)
        if not self.told.heads or data is None:
            return self._status(405 if data is not None else 404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        return self.end_headers()

    def do_GET(self):
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else None
        path = unquote(self.path.partition("?")[0])
        self.told.asked.append(Asked("GET", path, start))
        self.told.credentials.append((path, self.headers.get("Authorization")))
        fault = self.told.faults[path].pop(0) if self.told.faults[path] else ("none",)
        data = self.told.files.get(path)
        if fault[0] == "status" or data is None:
            return self._status(fault[1] if data is not None else 404)
        if fault[0] == "meet":
            self.told.barrier.wait(60)
        if fault[0] == "redirect":
            self.send_response(302)
            self.send_header("Location", fault[1])
            return self.end_headers()
        if fault[0] == "bytes":
            data, start = fault[1], None
        if start is None or not self.told.ranges:
            start = 0
            self.send_response(200)
        elif start >= len(data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            return self.end_headers()
        else:
            start += 7 if fault[0] == "elsewhere" else 0
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if self.told.lengths:
            self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        until = start + fault[1] if fault[0] in ("drop", "hold") else len(data)
        self.wfile.write(data[start:until])
        if fault[0] == "hold":
            self.wfile.flush()
            self.told.held.set()
            self.told.release.wait(120)
        return None

    def _status(self, code):
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def md5(data):
    return hashlib.md5(data).hexdigest()


def filelist(files):
    return "".join(f"{name} {md5(data)}\n" for name, data in files.items()).encode()


def tar(members, *, mode="w"):
    """A tar of name -> bytes, or name -> a function that changes its TarInfo."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, what in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                info.size = len(what)
                archive.addfile(info, io.BytesIO(what))
            else:
                what(info)
                archive.addfile(info)
    return out.getvalue()


def symlink(to):
    return lambda info: _kind(info, tarfile.SYMTYPE, to)


def hardlink(to):
    return lambda info: _kind(info, tarfile.LNKTYPE, to)


def special(kind):
    return lambda info: _kind(info, kind, "")


def _kind(info, kind, to):
    info.type, info.linkname = kind, to
