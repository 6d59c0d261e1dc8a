"""What the nodes say to each other, on the wire: JSON, authenticated with the job secret.

    server -> client   MAGIC, a nonce
    client -> server   MAGIC, its own nonce, proof: HMAC of both nonces
    server -> client   YES and its proof, or NO if the client's was wrong

then frames in both directions: length (4 bytes), HMAC (32 bytes), JSON. The HMAC covers the direction and the number of
the frame, under keys made from both nonces: a frame that is replayed, reordered, changed or sent in another connection
is not accepted. Nothing is encrypted. Everything here is without sockets, so that it can be tested without them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from typing import Any

MAGIC = b"fleetrun meets 1"
NONCE, MAC, HEADER = 32, 32, 4  # bytes
HELLO = len(MAGIC) + NONCE  # bytes that a server sends first
ANSWER = len(MAGIC) + NONCE + MAC  # bytes that a client answers
WELCOME = 1 + MAC  # bytes of a server that accepts
YES, NO = b"Y", b"N"
LARGEST = 1 << 20  # bytes of one frame


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


class ServerHandshake:
    def __init__(self, secret: bytes):
        self._secret = secret
        self._nonce = os.urandom(NONCE)
        self.hello = MAGIC + self._nonce

    def accept(self, answer: bytes) -> tuple[Channel, bytes]:
        """The channel, and what to send. Raises FrameError or WrongSecretError."""
        theirs = _nonce_of(answer)
        both = self._nonce + theirs
        if not hmac.compare_digest(answer[HELLO:], _mac(self._secret, b"client", both)):
            raise WrongSecretError
        return Channel(self._secret, both, server=True), YES + _mac(self._secret, b"server", both)


class ClientHandshake:
    def __init__(self, secret: bytes, hello: bytes):
        self._secret = secret
        own = os.urandom(NONCE)
        self._both = _nonce_of(hello) + own
        self.answer = MAGIC + own + _mac(secret, b"client", self._both)

    def finish(self, welcome: bytes) -> Channel:
        """Raises WrongSecretError if the server does not know the secret either."""
        if not hmac.compare_digest(welcome, YES + _mac(self._secret, b"server", self._both)):
            raise WrongSecretError
        return Channel(self._secret, self._both, server=False)


class Channel:
    """Packs and unpacks the frames of one connection, at one of its ends."""

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

    @staticmethod
    def size(header: bytes) -> int:
        """Bytes that follow the header."""
        (length,) = struct.unpack("!I", header)
        if length > LARGEST:
            raise FrameError(f"a frame of {length} bytes is too long")
        return int(length) + MAC

    def unpack(self, frame: bytes) -> dict[str, Any]:
        """The message in what follows a header."""
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
