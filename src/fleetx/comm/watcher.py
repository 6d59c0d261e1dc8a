"""A small process beside every rank: it sends heartbeats, sees the rank end or stop, and hears about the others.

It is a separate process because a thread of the rank cannot send heartbeats while C code holds the GIL, and a stopped
process cannot report that it is stopped. The watcher of rank 0 runs the hub (`hub.py`), to which the others connect.
Messages are lines of JSON. This file is run by path, with `python -I -S`: it imports only what is cheap, and of fleetx
only the files beside it.

All it needs is in its first message, so it can report that its rank was killed even if that happened before it ran.
"""

import mmap
import os
import signal
import socket
import struct
import sys
import time
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import kernel  # type: ignore[import-not-found]
    from hub import CONNECT, SILENT, WAITING, Hub  # type: ignore[import-not-found]
    from json_socket import LONGEST, JsonSocket  # type: ignore[import-not-found]

    del sys.path[0]
else:
    from fleetx.comm import kernel
    from fleetx.comm.hub import CONNECT, SILENT, WAITING, Hub
    from fleetx.comm.json_socket import LONGEST, JsonSocket

BEAT = 0.5  # seconds between heartbeats
TICK = 0.2  # seconds between checks of the rank
SOON = 0.05  # the same while a rank may be lost
STOPPED = 4.1  # seconds that a rank may be stopped by a signal; they are never overcounted
STRANGER = 1024  # bytes that a new connection may send before its token is checked
PROOF = 5.0  # seconds that it has to send the token
SPARE = 16  # connections without a token to allow, besides one per rank
PLACE = struct.Struct("<qqd32s")  # progress, steps, since when (monotonic), what the rank is doing
LATECOMERS = 2.0  # seconds for the other watchers to connect if rank 0 ends before they have
SCAN = 10  # heartbeats between checks of the rank's ports
BUSY = 0.1  # of a core: a rank that uses less is not computing
LAST = {"left", "raised", "gave up", "follows"}  # how a rank announces its end


class Watcher:
    def __init__(self, parent, start, memory, listener=None):
        self.parent, self.memory = parent, memory  # the socket to the rank, and the memory shared with it
        self.rank, self.size, self.pid, self.host = start["rank"], start["size"], start["pid"], start["host"]
        self.address, self.token = start["hub"], start["token"]
        self.pidfd = kernel.pidfd(self.pid)
        self.ended = False  # has the rank said how it ends?
        self.stopped: float | None = None  # seconds that the rank has been stopped by a signal
        self.silent = 0.0  # seconds since the last message from the hub
        self.patience = CONNECT  # how many to allow; until its first message, the hub may still be starting
        self.up: Any = None  # the connection to the hub
        self.hub: Any = Hub(self.size, self.from_own_hub) if self.rank == 0 else None
        self.clients = {}  # on rank 0: connection -> rank of another watcher
        self.strangers = {}  # without a token so far: connection -> when it was made (monotonic)
        self.listener: Any = listener
        self.verdict: Any = None
        self.hub_host, self.hub_left = start["hub_host"], False
        self.memory_kills = kernel.memory_kills()
        self.ports, self.beats = [], 0
        self.sockets: Any = (None, None)  # those of the rank at the last two scans
        self.at, self.asked = None, None  # the user's line that the rank stays in, and its progress there
        self.waits = False  # is that a call that communicates?
        self.idle: Any = None  # since when; when that was last checked, and the CPU seconds used by then

    # --- the connections --------------------------------------------------------------------------
    def connect(self):
        """Connect to the hub. If this fails, tell only this rank: the others find out when they miss this watcher."""
        if self.hub is not None:
            self.hub.join(0, self.host)
            return
        address, port = self.address
        end = time.monotonic() + CONNECT
        while True:
            try:
                made = socket.create_connection((address, port), timeout=5)
                break
            except OSError as error:
                if time.monotonic() > end or not kernel.parent_alive(self.pid, self.pidfd):
                    return self.parent.send(
                        {"failed": f"it cannot reach the one of rank 0 at {address}:{port}: {error}"}
                    )
                time.sleep(0.2)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.up = JsonSocket(made)
        self.up.send({"token": self.token, "rank": self.rank, "host": self.host})

    # --- the loop ---------------------------------------------------------------------------------
    def run(self, messages=()):
        self.connect()
        self.beat()
        self.hear_parent(messages)
        last = beaten = time.monotonic()
        while True:
            wait = SOON if self.stopped or self.longest_silence() > SILENT - BEAT else TICK
            found = kernel.readable([self.parent, self.pidfd, self.up, *self.doors()], wait)
            for one in found:
                if one is self.parent:
                    if not self.from_parent():
                        return
                elif one is self.up:
                    self.from_hub()
                else:
                    self.from_door(one)
            if self.pidfd in found or (self.pidfd is None and not kernel.parent_alive(self.pid, None)):
                self.parent_died()
                return
            now = time.monotonic()
            passed, last = min(now - last, BEAT), now  # silence does not count while this process itself was stopped
            self.look_at_rank(passed)
            if now - beaten >= (BEAT / 2 if self.still() else BEAT):
                beaten = now
                self.beat()
            self.look_around(passed)

    def look_at_rank(self, passed):
        """Check if the rank is stopped. Only time between two such checks counts, so that it is never overcounted."""
        if self.ended or not kernel.stopped(self.pid):
            self.stopped = None
            return
        before, self.stopped = self.stopped, 0.0 if self.stopped is None else self.stopped + passed
        if (before or 0.0) <= STOPPED < self.stopped:
            self.ports = kernel.listening(self.pid)  # the rank may have made a process group since the last scan
            self.tell_hub({"stopped": "", "ports": self.ports, **self.place()})

    def look_around(self, passed):
        self.silent += passed
        if self.hub is not None:
            self.hub.look(passed)
            for client in [one for one, since in self.strangers.items() if time.monotonic() - since > PROOF]:
                self.turn_away(client)
        elif self.up is not None and self.silent > self.patience:
            self.tell_parent({"rank": 0, "how": "silent", "silent": self.patience, "ports": [], **self.hub_place()})
            self.silent = 0.0

    def longest_silence(self):
        others = [rank.silent for rank in self.hub.ranks.values() if not rank.ended] if self.hub is not None else []
        return max([self.silent if self.up is not None else 0.0, *others])

    def place(self):
        progress, steps, since, doing = PLACE.unpack_from(self.memory)
        text = doing.rstrip(b"\0").decode("ascii", "replace")
        return {"progress": progress, "steps": steps, "for": time.monotonic() - since, "doing": text}

    def still(self):
        """Has the rank been in one place for so long that it may soon be reported?"""
        return time.monotonic() - PLACE.unpack_from(self.memory)[2] > WAITING - 4 * BEAT

    def beat(self):
        message = {"beat": self.rank, **self.place()}
        if self.beats % SCAN == 0 and (ports := self.scan()) != self.ports:
            self.ports = message["ports"] = ports
        self.beats += 1
        if self.still() and self.asked != message["progress"]:
            self.at, self.asked, self.waits, self.idle = None, message["progress"], False, None
        if self.still():
            self.parent.send({"where": True})
        if self.asked == message["progress"]:
            message["at"] = self.at
            message["idle"] = self.idle_for()
        self.tell_hub(message)

    def scan(self):
        """The ports of the rank. Finding them takes 10 ms if the kernel's table of all connections has room for many.

        So this is skipped while the rank's sockets stay the same. It is done once more after a change, because a new
        socket may not listen yet.
        """
        before, last = self.sockets
        now = set(kernel.socket_files(self.pid))
        self.sockets = last, now
        return self.ports if before == last == now else kernel.listening(self.pid)

    def idle_for(self):
        """For how many seconds has the rank neither computed nor had anything on the network?"""
        now, computed = time.monotonic(), kernel.cpu_seconds(self.pid)
        if computed is None or not self.waits:
            self.idle = None
            return 0.0
        since, last, before = self.idle or (now, now, computed)
        if computed - before > BUSY * (now - last) or kernel.queued(self.pid):
            since = now
        self.idle = since, now, computed
        return now - since

    def tell_hub(self, message):
        if self.hub is not None:
            self.hub.hear(0, message)
        elif self.up is not None:
            self.up.send(message)

    def hub_place(self):
        return {"host": self.hub_host, "steps": None, "doing": None, "for": SILENT}

    # --- what arrives from the rank ---------------------------------------------------------------
    def from_parent(self):
        messages = self.parent.read()
        if messages is None:
            self.parent_died()
            return False
        self.hear_parent(messages)
        return True

    def hear_parent(self, messages):
        for message in messages:
            if "at" in message:
                self.at, self.waits = message["at"], message.get("waits", False)
            elif "doubt" in message and self.hub is None and self.up is None:
                self.parent.send({"nobody": message["doubt"]})
            else:
                self.ended = self.ended or bool(LAST & message.keys())
                self.tell_hub(message | self.place() if LAST & message.keys() else message)

    def parent_died(self):
        if not self.ended:
            killed = kernel.memory_kills() > self.memory_kills
            self.tell_hub({"killed": "", "memory": killed, **self.place()})
        end = time.monotonic() + LATECOMERS
        while self.hub is not None and len(self.hub.ranks) < self.size and time.monotonic() < end:
            for one in kernel.readable(self.doors(), SOON):  # they must hear about it too
                self.from_door(one)
        if self.hub is not None:
            self.hub.tell_all({"bye": True})
        time.sleep(0.05)  # until all messages are on their way

    # --- what arrives from the hub ----------------------------------------------------------------
    def from_hub(self):
        messages = self.up.read()
        if messages is None:
            self.up = None
            if not self.hub_left and kernel.parent_alive(self.pid, self.pidfd):
                self.tell_parent({"rank": 0, "how": "vanished", "ports": [], **self.hub_place()})
            self.parent.send({"nobody": None})  # nobody will answer any more
            return
        self.silent, self.patience = 0.0, SILENT
        for message in messages:
            self.hear_hub(message)

    def from_own_hub(self, number, message):
        if number:
            for client in [client for client, rank in self.clients.items() if rank == number]:
                client.send(message)
        else:
            self.hear_hub(message)

    def hear_hub(self, message):
        if "verdict" in message:
            self.tell_parent(message["verdict"])
        elif "bye" in message:
            self.hub_left = True
        elif message:
            self.parent.send(message)

    def tell_parent(self, verdict):
        if self.verdict is None:
            self.verdict = verdict
            self.parent.send({"verdict": verdict})

    # --- on rank 0: what arrives from the other watchers --------------------------------------------
    def doors(self):
        return [self.listener, *self.clients, *self.strangers]

    def from_door(self, one):
        if one is self.listener:
            self.accept()
        elif one in self.clients:
            self.from_client(one, one.read())
        elif one in self.strangers:
            self.from_stranger(one)

    def accept(self):
        """A client that cannot prove that it belongs to the job costs little: few bytes, seconds and connections."""
        connection, _ = self.listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.strangers) >= self.size + SPARE:  # the oldest gives way: a watcher shows its token at once
            self.turn_away(next(iter(self.strangers)))
        self.strangers[JsonSocket(connection, STRANGER)] = time.monotonic()

    def turn_away(self, client):
        del self.strangers[client]
        client.socket.close()

    def from_stranger(self, client):
        messages = client.read()
        if messages == []:
            return
        first, *rest = messages or [{}]
        rank = first.get("rank")
        if not self.knows(first.get("token")) or type(rank) is not int or not 0 < rank < self.size:
            self.turn_away(client)
            return
        del self.strangers[client]
        client.limit = LONGEST
        self.clients[client] = rank
        self.hub.join(rank, str(first.get("host")))
        self.from_client(client, rest)

    def knows(self, token):
        from hmac import compare_digest  # only here: it takes longer to import than everything else

        return isinstance(token, str) and compare_digest(token.encode("utf-8", "replace"), self.token.encode())

    def from_client(self, client, messages):
        for message in messages or []:
            self.hub.hear(self.clients[client], message)
        if messages is None:
            rank = self.clients.pop(client)
            client.socket.close()
            self.hub.lose(rank, "vanished")


def main():
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the watcher ends when its rank has ended
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = JsonSocket(socket.socket(fileno=int(sys.argv[1])))
    messages: Any = []
    while not messages:
        messages = parent.read()
        if messages is None:
            return
    listener = socket.socket(fileno=int(sys.argv[3])) if len(sys.argv) > 3 else None
    watcher = Watcher(parent, messages[0], mmap.mmap(int(sys.argv[2]), PLACE.size), listener)
    watcher.run(messages[1:])


if __name__ == "__main__":
    main()
