"""Messages between a rank, its watcher and the other watchers: lines of JSON. No torch here."""

import contextlib
import json
import socket
from typing import Any

LONGEST = 1 << 20  # bytes of one line


class JsonSocket:
    """A socket that carries lines of JSON. limit: how many bytes of an unfinished line to keep."""

    def __init__(self, connection: socket.socket, limit: int = LONGEST):
        self.socket, self.limit, self._rest = connection, limit, b""
        connection.setblocking(True)
        connection.settimeout(2.0)  # for sending: a peer that does not read for that long is lost

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # reading detects it
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived; None at the end of the connection."""
        try:
            data = self.socket.recv(min(1 << 16, self.limit + 1 - len(self._rest)))
        except TimeoutError:
            return []
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self.limit or not data:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None
