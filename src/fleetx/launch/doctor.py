"""`fleetx doctor`: check whether this machine, or a set of machines, is ready for a run, and say what to fix.

To check another machine, run `fleetx doctor --listen ADDRESS` there, which answers on a port: no ssh is needed. An
answer is one line of JSON, an empty line to measure the latency, or LINK_BYTES bytes to measure the bandwidth.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import socket
import socketserver
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from fleetx.errors import LaunchError
from fleetx.launch.nodes import local_addresses

PORT = 8617
TIMEOUT = 10.0  # seconds to wait for another machine
LINK_BYTES = 32 << 20
OPEN_FILES, SHARED_MEMORY, MEMORY = 4096, 1 << 30, 2 << 30  # less than this is worth a warning
COMPARED = ("fleetx", "torch", "python", "driver")


@dataclass(frozen=True)
class Finding:
    """One thing that was checked. An empty `fix` means that it is fine."""

    what: str
    value: str
    fix: str = ""
    fatal: bool = False  # whether no run can work until it is fixed

    def __str__(self) -> str:
        mark = "ok  " if not self.fix else ("FAIL" if self.fatal else "warn")
        return f"{mark}  {self.what}: {self.value}" + (f"\n      {self.fix}" if self.fix else "")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "driver": _driver()}
    for name in ("fleetx", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def check_machine(folder: Path | None = None, *, several: bool = False) -> list[Finding]:
    """Check this machine. several: whether it will train together with other machines."""
    known = versions()
    findings = [Finding(name, known[name]) for name in COMPARED]
    if known["torch"] == "not installed":
        findings[COMPARED.index("torch")] = Finding("torch", "not installed", "install it: pip install torch", True)
    findings += [_host_name(several), _loopback(), _port(), _memory(), _shared_memory(), _open_files()]
    if folder is not None:
        findings.append(_folder(folder))
    return findings


def _driver() -> str:
    with contextlib.suppress(OSError):
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        return next((word for word in first.split() if word[:1].isdigit()), first)
    return "no NVIDIA driver"


def _host_name(several: bool) -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        fix = f"add a line with its address and {name} to /etc/hosts"
        return Finding("host name", f"{name} does not resolve", fix, several)
    if address.startswith("127."):
        fix = f"gloo would tell other machines to connect to themselves: give {name} its real address in /etc/hosts"
        return Finding("host name", f"{name} is {address}", fix if several else "", several)
    if address not in local_addresses():
        fix = "no interface of this machine has that address: correct /etc/hosts or DNS"
        return Finding("host name", f"{name} is {address}", fix, several)
    return Finding("host name", f"{name} is {address}")


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2):
            return Finding("loopback", "127.0.0.1 works")
    except OSError as error:
        return Finding("loopback", str(error), "bring it up: ip link set lo up", True)


def _port() -> Finding:
    """The range of ports for the connections between ranks."""
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        fix = "widen net.ipv4.ip_local_port_range" if high - low < 1000 else ""
        return Finding("ports", f"{low} to {high} for connections between ranks", fix)
    return Finding("ports", "chosen by the system")


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    return Finding("memory", f"{_size(free)} free", "end other programs" if free < MEMORY else "")


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("/dev/shm", "absent", "data loaders with workers need it; in a container, pass --shm-size=1g")
    fix = "data loaders with workers may fail: in a container, pass --shm-size=1g" if free < SHARED_MEMORY else ""
    return Finding("/dev/shm", f"{_size(free)} free", fix)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"every rank needs several per peer: raise it with `ulimit -n {hard}`" if 0 <= soft < OPEN_FILES else ""
    return Finding("open files", f"limit {soft}", fix)


def _folder(folder: Path) -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"fleetx")
            file.flush()
            os.fsync(file.fileno())
        return Finding("folder", f"{folder} can be written, {_size(shutil.disk_usage(folder).free)} free")
    except OSError as error:
        return Finding("folder", f"{folder}: {error.strerror}", "checkpoints could not be saved there", True)


# --- several machines -----------------------------------------------------------------------------
class _AnswerHandler(socketserver.StreamRequestHandler):
    timeout = TIMEOUT
    folder: Path | None = None

    def handle(self) -> None:
        asked = self.rfile.readline(64).strip()
        if asked == b"report":
            report = {"host": socket.gethostname(), "versions": versions()}
            found = [asdict(finding) for finding in check_machine(self.folder, several=True)]
            self.wfile.write(json.dumps(report | {"findings": found}).encode() + b"\n")
        elif asked == b"ping":
            self.wfile.write(b"\n")
        elif asked == b"bytes":
            block = bytes(1 << 20)
            for _ in range(LINK_BYTES // len(block)):
                self.wfile.write(block)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


def serve(address: str, port: int, folder: Path | None) -> Server:
    """Answer other machines in a thread, until the server is shut down."""
    handler = type("Answer", (_AnswerHandler,), {"folder": folder})
    try:
        server = Server((address, port), handler)
    except OSError as error:
        raise LaunchError(
            f"cannot listen on {address}:{port}: {error.strerror}. Is the address one of this machine "
            f"({', '.join(sorted(local_addresses()))}), and the port free? Choose another with --port"
        ) from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def check_host(host: str, port: int) -> tuple[list[Finding], dict[str, str]]:
    """(findings, versions) of another machine."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return [Finding("name", f"{host} does not resolve", "add it to /etc/hosts or DNS", True)], {}
    try:
        _, report = _ask(address, port, b"report")
        ping = min(_ask(address, port, b"ping")[0] for _ in range(3))
        transfer, data = _ask(address, port, b"bytes")
        found = json.loads(report)
        findings = [Finding(**finding) for finding in found["findings"]]
        known = {str(name): str(value) for name, value in found["versions"].items()}
    except OSError as error:
        fix = f"start `fleetx doctor --listen {address}` there, and open port {port} in its firewall"
        return [Finding("connection", f"{address}:{port}: {error}", fix, True)], {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return [Finding("connection", f"{address}:{port} is another program", "choose another --port", True)], {}
    speed = len(data) * 8 / max(transfer - ping, 1e-6)
    short = "the connection broke off" if len(data) < LINK_BYTES else ""
    link = Finding("link", f"{speed / 1e9:.2f} Gbit/s, {1000 * ping:.2f} ms to connect and answer", short)
    return [Finding("connection", f"{address}:{port} answers"), link, *findings], known


def _ask(address: str, port: int, question: bytes) -> tuple[float, bytes]:
    start = time.monotonic()
    with socket.create_connection((address, port), timeout=TIMEOUT) as connection:
        connection.sendall(question + b"\n")
        parts, size = [], 0
        while part := connection.recv(1 << 20):
            parts.append(part)
            size += len(part)
            if size > 2 * LINK_BYTES:
                break
    return time.monotonic() - start, b"".join(parts)


def differences(known: dict[str, dict[str, str]]) -> list[Finding]:
    """Versions that are not the same on all machines."""
    found = []
    for name in COMPARED:
        values = {host: versions.get(name, "unknown") for host, versions in known.items()}
        if len(set(values.values())) > 1:
            text = ", ".join(f"{value} on {host}" for host, value in values.items())
            found.append(Finding(name, text, "install the same version everywhere", name in ("fleetx", "torch")))
    return found


def examine(hosts: tuple[str, ...], port: int, folder: Path | None) -> dict[str, list[Finding]]:
    """Findings by machine."""
    here = socket.gethostname()
    found, known = {here: check_machine(folder, several=bool(hosts))}, {here: versions()}
    for host in hosts:
        found[host], theirs = check_host(host, port)
        if theirs:
            known[host] = theirs
    if len(known) > 1:
        found["all machines"] = differences(known) or [Finding("versions", "the same everywhere")]
    return found


def as_json(found: dict[str, list[Finding]]) -> str:
    plain: dict[str, Any] = {host: [asdict(finding) for finding in findings] for host, findings in found.items()}
    return json.dumps(plain, indent=2)


def _size(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB"
