"""The wire protocol between nodes: JSON, authenticated with the job secret.

    server -> client   MAGIC, a nonce
    client -> server   MAGIC, its own nonce, proof: HMAC of both nonces
    server -> client   YES and its proof, or NO if the client's was wrong

then frames in both directions: length (4 bytes), HMAC (32 bytes), JSON. The HMAC covers the direction and the number of
the frame, under keys derived from both nonces, so a frame that is replayed, reordered, changed or sent on another
connection is rejected. Nothing is encrypted. To be testable, this module uses no sockets: callers pass functions to
send and to read, and `read(n)` returns exactly n bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from collections.abc import Callable
from typing import Any

MAGIC = b"fleetrun meets 1"
NONCE, MAC, HEADER = 32, 32, 4  # bytes
HELLO = len(MAGIC) + NONCE  # bytes that each end sends first
YES, NO = b"Y", b"N"
LARGEST = 1 << 20  # bytes of one frame

Send = Callable[[bytes], object]
Read = Callable[[int], bytes]


class FrameError(Exception):
    """The peer does not know the secret, or does not speak this protocol."""


class WrongSecretError(FrameError):
    """The peer speaks the protocol, but with another secret."""


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def _nonce_of(data: bytes) -> bytes:
    if data[: len(MAGIC)] != MAGIC:
        raise FrameError("not fleetrun")
    return data[len(MAGIC) : HELLO]


def let_in(secret: bytes, send: Send, read: Read) -> Channel:
    """The server's end of the handshake. Raises FrameError or WrongSecretError."""
    own = os.urandom(NONCE)
    send(MAGIC + own)
    answer = read(len(MAGIC) + NONCE + MAC)
    both = own + _nonce_of(answer)
    if not hmac.compare_digest(answer[HELLO:], _mac(secret, b"client", both)):
        send(NO)
        raise WrongSecretError
    send(YES + _mac(secret, b"server", both))
    return Channel(secret, both, server=True)


def enter(secret: bytes, send: Send, read: Read) -> Channel:
    """The client's end of the handshake. Raises FrameError; WrongSecretError if either end does not know the secret."""
    hello, own = read(HELLO), os.urandom(NONCE)
    both = _nonce_of(hello) + own
    send(MAGIC + own + _mac(secret, b"client", both))
    if (first := read(1)) == NO:
        raise WrongSecretError
    if not hmac.compare_digest(first + read(MAC), YES + _mac(secret, b"server", both)):
        raise WrongSecretError
    return Channel(secret, both, server=False)


class Channel:
    """One end of a connection: packs and unpacks frames."""

    def __init__(self, secret: bytes, nonces: bytes, *, server: bool):
        to_client, to_server = (_mac(secret, name, nonces) for name in (b"to client", b"to server"))
        self._out, self._in = (to_client, to_server) if server else (to_server, to_client)
        self._sent = self._received = 0

    def pack(self, message: Any) -> bytes:
        body = json.dumps(message).encode()
        if len(body) > LARGEST:
            raise FrameError(f"a message of {len(body)} bytes is too long")
        mac = _mac(self._out, struct.pack("!Q", self._sent), body)
        self._sent += 1
        return struct.pack("!I", len(body)) + mac + body

    def receive(self, read: Read) -> dict[str, Any]:
        """The message in the next frame."""
        (length,) = struct.unpack("!I", read(HEADER))
        if length > LARGEST:
            raise FrameError(f"a frame of {length} bytes is too long")
        return self.unpack(read(MAC + length))

    def unpack(self, frame: bytes) -> dict[str, Any]:
        """The message in `frame`, which follows the header."""
        mac, body = frame[:MAC], frame[MAC:]
        if not hmac.compare_digest(mac, _mac(self._in, struct.pack("!Q", self._received), body)):
            raise FrameError("a frame is not authentic")
        self._received += 1
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise FrameError("a frame is not JSON") from None
        if not isinstance(message, dict):
            raise FrameError("a frame is not a JSON object")
        return message
