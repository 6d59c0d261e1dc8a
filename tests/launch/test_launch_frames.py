"""The door of the meeting: who knows the secret gets in, and nobody else does any harm."""

from __future__ import annotations

import io
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import until

from fleetx.errors import LaunchError
from fleetx.launch import meeting_ends
from fleetx.launch.fork_server import read_exactly
from fleetx.launch.frames import (
    HEADER,
    HELLO,
    LARGEST,
    MAC,
    MAGIC,
    NONCE,
    YES,
    Channel,
    FrameError,
    WrongSecretError,
    enter,
    let_in,
)
from fleetx.launch.meeting import Meeting, MeetingError
from fleetx.launch.meeting_ends import MeetingClient, MeetingServer, NoMeetingError
from fleetx.launch.secret import read_secret
from fleetx.launch.sockets import listen, port_of

SECRET = b"a secret of the job"
SETTINGS = {"address": "a"}


def shake_hands(server_secret=SECRET, client_secret=SECRET) -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        server = pool.submit(let_in, server_secret, ours.sendall, partial(read_exactly, ours))
        client = enter(client_secret, theirs.sendall, partial(read_exactly, theirs))
        return server.result(), client


def connected() -> tuple[Channel, Channel]:
    """Both ends of a new connection, as after the handshake."""
    nonces = os.urandom(2 * NONCE)
    return Channel(SECRET, nonces, server=True), Channel(SECRET, nonces, server=False)


def enter_where(server_says: bytes) -> bytes:
    """What a client answers to a server's nonce, which then says this."""
    sent = []
    hello = MAGIC + os.urandom(NONCE)
    with pytest.raises(WrongSecretError):
        enter(SECRET, sent.append, io.BytesIO(hello + server_says).read)
    return sent[0]


def let_in_who(answers: bytes) -> list[bytes]:
    """What a server says before and after this answer."""
    sent = []
    with pytest.raises(FrameError):
        let_in(SECRET, sent.append, lambda size: answers)
    return sent


def opened(channel: Channel, frame: bytes):
    return channel.receive(io.BytesIO(frame).read)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.tuples(st.booleans(), st.dictionaries(st.text(), JSON, max_size=3)), max_size=5))
def test_what_is_packed_is_unpacked(messages):
    server, client = connected()
    for to_server, message in messages:
        source, target = (client, server) if to_server else (server, client)
        assert opened(target, source.pack(message)) == message


@given(st.binary(max_size=300))
def test_junk_is_never_accepted(data):
    server, client = connected()
    for channel in (server, client):
        with pytest.raises(FrameError):
            channel.unpack(data)
    let_in_who(data)
    enter_where(server_says=data)


@given(st.data())
def test_a_frame_with_one_changed_bit_is_not_accepted(data):
    server, client = connected()
    frame = bytearray(client.pack({"call": "look"})[HEADER:])
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(FrameError, match="not authentic"):
        server.unpack(bytes(frame))


def test_a_frame_is_accepted_once_in_order_in_its_direction_and_in_its_connection():
    server, client = connected()
    first, second = client.pack({"n": 1}), client.pack({"n": 2})
    for wrong in (second, server.pack({"n": 1}), connected()[1].pack({"n": 1})):
        with pytest.raises(FrameError):
            opened(server, wrong)
    assert opened(server, first) == {"n": 1}
    with pytest.raises(FrameError):
        opened(server, first)
    assert opened(server, second) == {"n": 2}


def test_a_handshake_cannot_be_replayed():
    hello, refusal = let_in_who(enter_where(server_says=b""))
    assert (len(hello), refusal) == (HELLO, b"N")


def test_both_ends_must_know_the_secret():
    server, client = shake_hands()
    assert opened(server, client.pack({"n": 1})) == {"n": 1}
    assert opened(client, server.pack({"n": 2})) == {"n": 2}
    with pytest.raises(WrongSecretError):
        shake_hands(client_secret=b"another secret of a job")
    enter_where(server_says=YES + os.urandom(MAC))


def test_a_frame_that_is_too_long_is_refused_before_it_is_read():
    server, client = connected()
    with pytest.raises(FrameError, match="too long"):
        server.receive(io.BytesIO(struct.pack("!I", LARGEST + 1)).read)
    with pytest.raises(FrameError, match="too long"):
        client.pack({"x": "x" * LARGEST})


@pytest.mark.parametrize("body", [b"[]", b"1", b"{", b"\xff", b"[" * 100_000], ids=lambda body: str(body[:3]))
def test_an_authentic_frame_must_still_be_a_json_object(body):
    server, client = connected()
    frame = client.pack({})
    mac_of_body = Channel.pack.__globals__["_mac"](client._out, struct.pack("!Q", 1), body)
    opened(server, frame)
    with pytest.raises(FrameError, match=r"not JSON|not a JSON object"):
        server.unpack(mac_of_body + body)


# ---------------------------------------------------------------------- with sockets


@pytest.fixture
def server(monkeypatch):
    """A meeting of two nodes on a port; `said` is what it printed."""
    monkeypatch.setattr(meeting_ends, "PENDING", 8)
    listener = listen("127.0.0.1")
    said: list[str] = []
    meeting = Meeting(nodes=2, minimum=2)
    server = MeetingServer(listener, meeting, secret=SECRET, print_status=said.append)
    server.said, server.port = said, port_of(listener)
    yield server
    server.end()
    assert not server._thread.is_alive()


def join(server, node=1):
    client = MeetingClient("127.0.0.1", server.port, secret=SECRET)
    client.call("join", node, token="t", settings=SETTINGS)
    return client


def test_a_node_with_the_secret_takes_part(server):
    client = join(server)
    assert client.call("look", 1, attempt=0)["missing"] == [0, 1]
    client.close()


def test_a_node_with_another_secret_is_told_so_and_so_is_node_0(server):
    for secret in (b"another secret of a job", b""):
        with pytest.raises(
            LaunchError, match=r"node 0 at 127.0.0.1:\d+ has a different job secret: give all nodes the same"
        ):
            MeetingClient("127.0.0.1", server.port, secret=secret)
    until(lambda: server.said, what="node 0 to be told")
    assert server.said == ["refused a connection from 127.0.0.1: it has a different job secret"]  # once
    join(server).close()


JUNK = [
    b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 1000, b"\xff" * (HELLO + MAC), b"fleetrun meets 1",
    b'{"call": "stop"}', os.urandom(HELLO + MAC), b"x" * (1 << 20),
]  # fmt: skip


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_junk_is_dropped_without_harm(server, junk):
    known = join(server)
    with socket.create_connection(("127.0.0.1", server.port)) as peer:
        try:
            peer.sendall(junk)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(1000):
                pass
        except OSError:
            pass  # dropped
    assert known.call("look", 1, attempt=0)["stop"] is None
    known.close()


def test_a_replayed_session_changes_nothing(server):
    """What a listener on the wire has recorded is worthless."""
    recorded = []
    with pytest.MonkeyPatch.context() as patch:
        sendall = socket.socket.sendall
        patch.setattr(socket.socket, "sendall", lambda peer, data: (recorded.append(data), sendall(peer, data))[1])
        client = join(server)
        client.call("stop", 1, reason="not again")
    client.close()
    server._meeting._stop = None
    with socket.create_connection(("127.0.0.1", server.port)) as peer:
        try:
            for data in recorded:
                peer.sendall(data)
            while peer.recv(1000):
                pass
        except OSError:
            pass
    again = join(server)
    assert again.call("look", 1, attempt=0)["stop"] is None
    again.close()


def test_many_silent_connections_neither_pile_up_nor_keep_a_node_out(server):
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    try:
        client = join(server)
        assert client.call("look", 1, attempt=0)["stop"] is None
        until(lambda: len(server._connections) <= meeting_ends.PENDING + 1, what="the others to be dropped")
        client.close()
    finally:
        for peer in idle:
            peer.close()


def test_a_connection_that_does_not_finish_its_handshake_is_closed(server, monkeypatch):
    monkeypatch.setattr(meeting_ends, "HANDSHAKE", 0.1)
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.settimeout(60)
        slow.sendall(b"f")
        while slow.recv(1000):
            pass  # until it is closed
    assert not server._connections


def test_a_call_that_is_not_understood_is_refused(server):
    client = join(server)
    for name, arguments in [("nonsense", {}), ("look", {}), ("look", {"x": 1}), ("publish", {}), ("join", {})]:
        with pytest.raises(MeetingError):
            client.call(name, 1, **arguments)
    for settings in (None, 1, {}, {"address": 1}):
        with pytest.raises(MeetingError, match="same version of fleetx"):
            client.call("join", 0, token="t", settings=settings)
    assert client.call("look", 1, attempt=0)["stop"] is None
    client.close()


def test_nobody_listens_where_no_meeting_is():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(NoMeetingError):
            MeetingClient("127.0.0.1", bound.getsockname()[1], secret=SECRET)


# ---------------------------------------------------------------------- where the secret comes from


def test_the_secret_comes_from_a_private_file_or_a_variable(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"  0123456789abcdef\n")
    file.chmod(0o600)
    assert read_secret(str(file), environ={}) == b"0123456789abcdef"
    assert read_secret(None, environ={"FLEETX_JOB_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    assert read_secret(None, environ={}) == b""
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(LaunchError, match="others can read or change it; run `chmod 600"):
            read_secret(str(file), environ={})


def test_a_secret_that_is_no_secret_is_an_error(tmp_path):
    for value in ("", "short", "x" * 5000):
        with pytest.raises(LaunchError, match="must have 16 to 4096 bytes, such as the output of `openssl") as error:
            read_secret(None, environ={"FLEETX_JOB_SECRET": value})
        assert not value or value not in str(error.value)
    with pytest.raises(LaunchError, match="both given"):
        read_secret("x", environ={"FLEETX_JOB_SECRET": "0123456789abcdef"})
    for name in (str(tmp_path), str(tmp_path / "missing"), "a\0b"):
        with pytest.raises(LaunchError, match=r"cannot be read|is not the name"):
            read_secret(name, environ={})
