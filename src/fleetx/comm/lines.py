"""Messages between a rank, its watcher and the other watchers: lines of JSON. No torch here."""

import contextlib
import json
import socket
from typing import Any


class Lines:
    """A socket that carries lines of JSON."""

    def __init__(self, connection: socket.socket):
        self.socket, self._rest = connection, b""
        connection.setblocking(True)
        connection.settimeout(2.0)  # for sending: who does not read for that long is lost

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # reading finds out
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived; None at the end of the connection."""
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > 1 << 20 or not data:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None
