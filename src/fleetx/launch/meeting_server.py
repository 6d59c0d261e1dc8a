"""Node 0's end of the meeting: a thread that lets in those who know the secret, and answers their calls.

Whoever cannot prove to know the secret costs little and harms nothing: a connection has HANDSHAKE seconds, there are at
most PENDING of them, and no byte of theirs is parsed before the proof has been checked.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from fleetx.launch.frames import ANSWER, HEADER, NO, Channel, FrameError, ServerHandshake, WrongSecretError
from fleetx.launch.meeting import Meeting, MeetingError

HANDSHAKE = 5.0  # seconds
PENDING = 64  # connections that have not proved anything yet; the oldest gives way
KNOWN = 4  # connections per node


class _Connection:
    def __init__(self, peer: socket.socket, address: str, secret: bytes):
        self.peer, self.address = peer, address
        self.since = time.monotonic()
        self.handshake = ServerHandshake(secret)
        self.channel: Channel | None = None
        self.received = b""
        self.sending = self.handshake.hello
        self.closing = False  # once everything is sent
        self.joined: tuple[int, str] | None = None  # node and token

    def wanted(self) -> int:
        """Bytes of the next piece: the handshake, a header, or a frame with its header."""
        if self.channel is None:
            return ANSWER
        if len(self.received) < HEADER:
            return HEADER
        return HEADER + self.channel.size(self.received[:HEADER])


class MeetingServer:
    def __init__(
        self, listener: socket.socket, meeting: Meeting, *, secret: bytes, print_status: Callable[[str], None]
    ):
        self._listener, self._meeting, self._secret = listener, meeting, secret
        self._print_status = print_status
        self._refused: set[str] = set()  # addresses that were named already
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleetrun-meeting", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._ended.is_set():
            for key, events in self._selector.select(0.1):
                if key.fileobj is self._listener:
                    self._accept()
                elif connection := self._connections.get(key.fd):
                    try:
                        self._serve(connection, events)
                    except (OSError, FrameError):
                        self._close(connection)
            self._close_slow()
        for connection in list(self._connections.values()):
            self._close(connection)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # too many open files, or it is gone already
            peer, address = self._listener.accept()
            peer.setblocking(False)
            connection = _Connection(peer, str(address[0]), self._secret)
            self._connections[peer.fileno()] = connection
            self._selector.register(peer, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _serve(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_READ and not connection.closing:
            self._read(connection)
        if connection.sending:
            sent = connection.peer.send(connection.sending) if events & selectors.EVENT_WRITE else 0
            connection.sending = connection.sending[sent:]
        if connection.closing and not connection.sending:
            self._close(connection)
        else:
            more = selectors.EVENT_WRITE if connection.sending else 0
            self._selector.modify(connection.peer, selectors.EVENT_READ | more)

    def _read(self, connection: _Connection) -> None:
        wanted = connection.wanted()
        if len(connection.received) < wanted:
            data = connection.peer.recv(min(wanted - len(connection.received), 1 << 16))
            if not data:
                raise FrameError("closed")
            connection.received += data
        if len(connection.received) < connection.wanted():
            return
        data, connection.received = connection.received, b""
        if connection.channel is None:
            self._let_in(connection, data)
        else:
            request = connection.channel.unpack(data[HEADER:])
            connection.sending += connection.channel.pack(self._answer(connection, request))

    def _let_in(self, connection: _Connection, answer: bytes) -> None:
        try:
            connection.channel, welcome = connection.handshake.accept(answer)
            connection.sending += welcome
        except WrongSecretError:
            connection.sending += NO
            connection.closing = True
            if connection.address not in self._refused and len(self._refused) < PENDING:
                self._refused.add(connection.address)
                self._print_status(f"refused a connection from {connection.address}: it has another job secret")

    def _answer(self, connection: _Connection, request: dict[str, Any]) -> dict[str, Any]:
        try:
            name, node, arguments = request["call"], int(request["node"]), dict(request["arguments"])
            result = self._meeting.call(name, node, **arguments)
            if name == "join":
                connection.joined = node, arguments["token"]
            return {"result": result}
        except MeetingError as error:
            return {"refused": str(error)}
        except (KeyError, TypeError, ValueError, AttributeError):  # of another version of fleetx
            return {"refused": "node 0 does not understand this call: all nodes need the same version of fleetx"}

    def _close_slow(self) -> None:
        pending = [c for c in self._connections.values() if c.channel is None]
        pending.sort(key=lambda connection: connection.since)
        known = [c for c in self._connections.values() if c.channel is not None]
        late = [c for c in pending if time.monotonic() - c.since > HANDSHAKE]
        for connection in {*late, *pending[:-PENDING], *known[: -KNOWN * self._meeting.nodes]}:
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        if self._connections.pop(connection.peer.fileno(), None) is None:
            return
        self._selector.unregister(connection.peer)
        connection.peer.close()
        if connection.joined:
            self._meeting.disconnected(*connection.joined)
