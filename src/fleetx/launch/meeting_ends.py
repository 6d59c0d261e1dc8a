"""Both ends of the meeting on the network: node 0 serves, the other nodes call.

The server admits peers that know the secret and answers their calls, one thread per connection. A peer that cannot
prove that it knows the secret costs little and can do no harm: it has HANDSHAKE seconds, there are at most PENDING such
connections, and no message is parsed before the proof has been checked.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from fleetx.errors import LaunchError
from fleetx.launch.fork_server import read_exactly
from fleetx.launch.frames import FrameError, WrongSecretError, enter, let_in
from fleetx.launch.meeting import Meeting, MeetingError

HANDSHAKE = 5.0  # seconds
PENDING = 64  # connections without a proof yet; above this, the oldest is closed
KNOWN = 4  # connections with a proof, per node
CONNECT_TIMEOUT = 5.0  # seconds for one try
ANSWER_TIMEOUT = 15.0  # seconds


class MeetingServer:
    def __init__(
        self, listener: socket.socket, meeting: Meeting, *, secret: bytes, print_status: Callable[[str], None]
    ):
        self._listener, self._meeting, self._secret = listener, meeting, secret
        self._print_status = print_status
        self._refused: set[str] = set()  # addresses already reported
        self._connections: dict[socket.socket, float | None] = {}  # when each was accepted; None after its proof
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleetrun-meeting", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(5)

    def _run(self) -> None:
        self._listener.settimeout(0.1)
        while not self._ended.is_set():
            with contextlib.suppress(OSError, RuntimeError):  # nobody came, or too many open files or threads
                peer, address = self._listener.accept()
                self._connections[peer] = time.monotonic()
                threading.Thread(target=self._serve, args=(peer, str(address[0])), daemon=True).start()
            self._close_slow()
        for peer in list(self._connections):
            self._close(peer)
        self._listener.close()

    def _serve(self, peer: socket.socket, address: str) -> None:
        joined: tuple[int, str] | None = None
        read = functools.partial(read_exactly, peer)
        try:
            with peer:
                channel = let_in(self._secret, peer.sendall, read)
                self._connections[peer] = None
                while True:
                    request = channel.receive(read)
                    answer = self._answer(request)
                    if request.get("call") == "join" and "result" in answer:
                        joined = int(request["node"]), request["arguments"]["token"]
                    peer.sendall(channel.pack(answer))
        except WrongSecretError:
            if address not in self._refused and len(self._refused) < PENDING:
                self._refused.add(address)
                self._print_status(f"refused a connection from {address}: it has a different job secret")
        except (OSError, EOFError, FrameError):
            pass  # it is gone, or never was a node
        self._connections.pop(peer, None)
        if joined:
            self._meeting.disconnected(*joined)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"result": self._meeting.call(request["call"], int(request["node"]), **request["arguments"])}
        except MeetingError as error:
            return {"refused": str(error)}
        except (KeyError, TypeError, ValueError, AttributeError):  # from another version of fleetx
            return {"refused": "node 0 does not understand this call: all nodes need the same version of fleetx"}

    def _close_slow(self) -> None:
        connections, now = list(self._connections.items()), time.monotonic()
        known = [peer for peer, since in connections if since is None]
        pending = [peer for peer, since in connections if since is not None]  # the oldest first
        late = [peer for peer, since in connections if since is not None and now - since > HANDSHAKE]
        for peer in {*late, *pending[:-PENDING], *known[: -KNOWN * self._meeting.nodes]}:
            self._close(peer)

    def _close(self, peer: socket.socket) -> None:
        self._connections.pop(peer, None)
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it


class NoMeetingError(Exception):
    """Nothing listens at this address, or something other than fleetrun. Retrying may help."""


class MeetingClient:
    """One connection to node 0. Raises OSError or EOFError when it is lost."""

    def __init__(self, host: str, port: int, *, secret: bytes):
        try:
            self._peer = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
        except OSError as error:
            raise NoMeetingError(str(error)) from None
        try:
            self._peer.settimeout(ANSWER_TIMEOUT)
            self._read = functools.partial(read_exactly, self._peer)
            self._channel = enter(secret, self._peer.sendall, self._read)
        except WrongSecretError:
            self.close()
            raise LaunchError(
                f"node 0 at {host}:{port} has a different job secret: give all nodes the same FLEETX_JOB_SECRET or "
                f"--secret_file"
            ) from None
        except (OSError, EOFError, FrameError) as error:
            self.close()
            raise NoMeetingError(str(error)) from None
        except BaseException:
            self.close()
            raise
        self.address = str(self._peer.getsockname()[0])  # of this node, as node 0 sees it without NAT

    def call(self, name: str, node: int, **arguments: Any) -> Any:
        try:
            self._peer.sendall(self._channel.pack({"call": name, "node": node, "arguments": arguments}))
            answer = self._channel.receive(self._read)
        except FrameError as error:
            raise OSError(str(error)) from None
        if "refused" in answer:
            raise MeetingError(str(answer["refused"]))
        return answer.get("result")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._peer.close()
