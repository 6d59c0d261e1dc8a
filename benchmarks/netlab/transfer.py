"""Measures the speed of a link: sends bytes from one host to another with plain sockets.

The two hosts run `python -m benchmarks.netlab.transfer receive` and `... send ADDRESS BYTES`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time

from benchmarks.netlab.lab import Lab, LabError
from benchmarks.netlab.measured import Measured

PORT = 5001
PATIENCE = 30.0  # seconds for the other side
CHUNK = 1 << 18
MODULE = [sys.executable, "-m", "benchmarks.netlab.transfer"]


def transfer(lab: Lab, *, size: int, sender: int = 0, receiver: int = 1) -> Measured:
    """The time ends when the receiver has read everything and closes: bytes in buffers have not arrived yet."""
    seconds = PATIENCE + 2 * size * 8 / lab.bits if lab.bits else PATIENCE
    end = lab.popen(receiver, [*MODULE, "receive"], stdout=subprocess.PIPE, text=True)
    assert end.stdout is not None
    with end.stdout:
        if end.stdout.readline() != "ready\n":
            raise LabError(f"host {receiver} could not listen")
        before = lab.bytes(sender)
        done = lab.run(sender, [*MODULE, "send", lab.addresses[receiver], str(size)], timeout=seconds)
        counted = (lab.bytes(sender) - before).sent
        arrived = end.stdout.readline().strip()
    if end.wait() or arrived != str(size):
        raise LabError(f"{arrived or 'none'} of {size} bytes arrived at host {receiver}")
    return Measured(f"sockets, {sender} to {receiver}", float(done.stdout), size, counted)


def receive() -> None:
    with socket.create_server(("", PORT)) as listener:
        listener.settimeout(PATIENCE)
        print("ready", flush=True)
        connection, _ = listener.accept()
    buffer, arrived = bytearray(CHUNK), 0
    with connection:
        connection.settimeout(PATIENCE)
        while count := connection.recv_into(buffer):
            arrived += count
    print(arrived, flush=True)


def send(address: str, size: int) -> None:
    chunk = memoryview(bytes(CHUNK))
    with socket.create_connection((address, PORT), timeout=PATIENCE) as connection:
        start = time.perf_counter()
        for place in range(0, size, CHUNK):
            connection.sendall(chunk[: size - place])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "receive":
        receive()
    else:
        send(arguments[0], int(arguments[1]))
