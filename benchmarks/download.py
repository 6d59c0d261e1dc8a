"""How fast Downloader fetches files over HTTP, against fsspec's HTTP file system.

The server is a separate process on loopback. Both sides use the same number of connections and check the md5 of every
file. Ours also asks for the length of each file first, and keeps what it needs to resume.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.frame import CannotRunError, Run, Sides, benchmark

CONNECTIONS = 10


@benchmark(ours="fleetx", theirs="fsspec", rounds=10, starts=2)
def small(run: Run) -> Sides:
    """300 files of 16 KiB."""
    return compare(run, files=300, size=16 << 10)


@benchmark(ours="fleetx", theirs="fsspec", rounds=10, starts=2)
def large(run: Run) -> Sides:
    """One file of 256 MiB."""
    return compare(run, files=1, size=256 << 20)


def compare(run: Run, *, files: int, size: int) -> Sides:
    if importlib.util.find_spec("aiohttp") is None:
        raise CannotRunError("fsspec's HTTP file system needs aiohttp, which is not installed")
    import fsspec

    from fleetx.paddle.download.downloader import Downloader

    with served(files, size) as (url, sums), tempfile.TemporaryDirectory(prefix="download-") as name:
        folder = Path(name)
        (folder / "set.yaml").write_text(f"bos_path: {url}\n")
        http = fsspec.filesystem("http")

        def ours() -> None:
            Downloader().download_from_bos(folder / "set.yaml", str(folder / "ours"), process_num=CONNECTIONS)
            shutil.rmtree(folder / "ours")

        def theirs() -> None:
            paths = [str(folder / "theirs" / file) for file in sums]
            http.get([f"{url}/{file}" for file in sums], paths, batch_size=CONNECTIONS)
            for path, md5 in zip(paths, sums.values(), strict=True):
                with open(path, "rb") as file:
                    assert hashlib.file_digest(file, "md5").hexdigest() == md5
            shutil.rmtree(folder / "theirs")

        with open(os.devnull, "w") as sys.stderr:
            sides = run.compare(ours, theirs)
        sys.stderr = sys.__stderr__
        rates = {"ours": files * size / min(sides.ours) / 1e6, "theirs": files * size / min(sides.theirs) / 1e6}
        sides.notes["megabytes_per_second"] = rates
        return sides


@contextmanager
def served(files: int, size: int) -> Iterator[tuple[str, dict[str, str]]]:
    """A folder of random files on a server: its address, and the md5 of each file."""
    with tempfile.TemporaryDirectory(prefix="served-") as folder:
        sums = {}
        for number in range(files):
            data = os.urandom(size)
            Path(folder, f"{number}.bin").write_bytes(data)
            sums[f"{number}.bin"] = hashlib.md5(data).hexdigest()
        Path(folder, "filelist.txt").write_text("".join(f"{name} {md5}\n" for name, md5 in sums.items()))
        Path(folder, "meta.txt").write_text("")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        options = ["--bind", "127.0.0.1", "--protocol", "HTTP/1.1", "--directory", folder]
        server = subprocess.Popen(
            [sys.executable, "-m", "http.server", str(port), *options],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_for(port)
            yield f"http://127.0.0.1:{port}", sums
        finally:
            server.kill()
            server.wait()


def wait_for(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server did not start within a minute")
