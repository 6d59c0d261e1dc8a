"""The other nodes' end of the meeting: calls over the network."""

from __future__ import annotations

import contextlib
import functools
import socket
from typing import Any

from fleetx.errors import LaunchError
from fleetx.launch.fork_server import read_exactly
from fleetx.launch.frames import FrameError, WrongSecretError, enter
from fleetx.launch.meeting import MeetingError

CONNECT_TIMEOUT = 5.0  # seconds for one try
ANSWER_TIMEOUT = 15.0  # seconds


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
                f"node 0 at {host}:{port} has another job secret: give all nodes the same FLEETX_JOB_SECRET or "
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
