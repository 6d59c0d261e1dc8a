"""The watcher: a small process beside every rank. It beats for the rank, sees it end or stop, and hears of the others.

It is a process of its own because a thread of the rank cannot beat while C code holds the interpreter's lock, and a
stopped process cannot say that it is stopped. The watcher of rank 0 is the hub: the others connect to it and send

    beat    twice a second: the rank's place in the training, read from memory that the rank shares with its watcher
    left, raised, follows, killed        how the rank ended

The hub writes down the first rank that was lost and tells everybody. Messages are lines of JSON. This file is run by
its path with `python -I -S`: it imports only what costs nothing, and from fleetx only two files beside it.
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
    from lines import Lines  # type: ignore[import-not-found]

    del sys.path[0]
else:
    from fleetx.comm import kernel
    from fleetx.comm.lines import Lines

BEAT = 0.5  # seconds between two heartbeats
PATIENCE = 4.5  # seconds that a rank may be stopped or silent
WAITING = 5.0  # seconds after which a rank that others wait for is named
CONNECT = 30.0  # seconds to reach the hub
PLACE = struct.Struct("<qqd32s")  # progress, steps, since when (monotonic), what the rank is doing
SCAN = 10  # beats between two looks at the ports of the rank


class Rank:
    """What the hub knows about a rank."""

    def __init__(self, host):
        self.host, self.beat = host, {}
        self.silent = 0.0  # seconds since it was last heard of, not counting those in which the hub slept
        self.ports = []
        self.ended = False
        self.longest = 0.0  # seconds that it has stayed in one place before

    def hear(self, message):
        old = self.beat
        if old and message["progress"] != old["progress"]:
            self.longest = max(self.longest, old["for"])
        self.beat, self.silent = message, 0.0
        self.ports = message.get("ports", self.ports)

    def place(self):
        return {key: self.beat.get(key) for key in ("steps", "doing", "for", "at")}


class Watcher:
    def __init__(self, parent, start, memory):
        self.parent, self.memory = parent, memory  # the socket to the rank, and the memory shared with it
        self.rank, self.size, self.pid, self.host = start["rank"], start["size"], start["pid"], start["host"]
        self.token = start["token"]
        self.pidfd = kernel.pidfd(self.pid)
        self.ended = False  # has the rank said how it ends?
        self.stopped = 0.0  # seconds that the rank has been stopped by a signal
        self.silent = 0.0  # seconds without a word from the hub
        self.hub: Any = None  # the connection to the hub
        self.ranks = {self.rank: Rank(self.host)} if self.rank == 0 else {}
        self.clients = {}  # on the hub: connection -> rank, or None before its first line
        self.listener: Any = None
        self.verdict: Any = None
        self.noticed = {}  # on the hub: which ranks were named as late, and when they are named again
        self.hub_host, self.hub_left = "?", False
        self.memory_kills = kernel.memory_kills()
        self.ports, self.beats = [], 0
        self.at, self.asked = None, None  # the line of the user's code that the rank is in, if it stays there

    # --- the connections --------------------------------------------------------------------------
    def listen(self, addresses):
        for address in addresses:
            try:
                self.listener = socket.create_server((address, 0), backlog=self.size)
            except OSError:
                continue
            return self.parent.send({"listening": [address, self.listener.getsockname()[1]]})
        self.parent.send({"failed": f"it cannot listen on {' or '.join(addresses)}"})

    def connect(self, address, port):
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
        self.hub = Lines(made)
        self.hub.send({"token": self.token, "rank": self.rank, "host": self.host})
        self.beat()

    # --- the loop ---------------------------------------------------------------------------------
    def run(self):
        last = beaten = time.monotonic()
        while True:
            for one in kernel.readable([self.parent, self.pidfd, self.hub, self.listener, *self.clients], BEAT / 2):
                if one is self.parent:
                    if not self.from_parent():
                        return
                elif one is self.hub:
                    if not self.from_hub():
                        return
                elif one is self.listener:
                    self.accept()
                elif one in self.clients:
                    self.from_client(one)
            if not kernel.parent_alive(self.pid, self.pidfd):
                self.parent_died()
                return
            now = time.monotonic()
            passed, last = min(now - last, BEAT), now  # while this process was stopped itself, nobody was silent
            self.stopped = self.stopped + passed if kernel.stopped(self.pid) else 0.0
            self.silent += passed
            for rank in self.ranks.values():
                rank.silent += passed
            if now - beaten >= BEAT:
                beaten = now
                self.beat()
                self.look_around()

    def place(self):
        progress, steps, since, doing = PLACE.unpack_from(self.memory)
        text = doing.rstrip(b"\0").decode("ascii", "replace")
        return {"progress": progress, "steps": steps, "for": time.monotonic() - since, "doing": text}

    def beat(self):
        message = {"beat": self.rank, "stopped": self.stopped, **self.place()}
        if self.beats % SCAN == 0 and (ports := kernel.listening(self.pid)) != self.ports:
            self.ports = message["ports"] = ports
        self.beats += 1
        if message["for"] > WAITING - 4 * BEAT and self.asked != message["progress"]:
            self.at, self.asked = None, message["progress"]
            self.parent.send({"where": True})
        if self.asked == message["progress"]:
            message["at"] = self.at
        self.tell_hub(message)

    def tell_hub(self, message):
        if self.rank == 0:
            self.at_hub(0, message)
        elif self.hub is not None:
            self.hub.send(message)

    def look_around(self):
        if self.rank == 0:
            for number, rank in list(self.ranks.items()):
                if not rank.ended and rank.beat:
                    if rank.beat["stopped"] > PATIENCE:
                        self.lose(number, "stopped")
                    elif rank.silent > PATIENCE and number:
                        self.lose(number, "silent")
            self.notice()
        elif self.hub is not None and self.silent > PATIENCE:
            self.tell_parent({"rank": 0, "how": "silent", "ports": [], **self.hub_place()})
            self.silent = 0.0

    def hub_place(self):
        return {"host": self.hub_host, "steps": None, "doing": None, "for": PATIENCE}

    # --- what arrives -----------------------------------------------------------------------------
    def from_parent(self):
        messages = self.parent.read()
        if messages is None:
            self.parent_died()
            return False
        self.hear_parent(messages)
        return True

    def hear_parent(self, messages):
        for message in messages:
            if "listen" in message:
                self.listen(message["listen"])
            elif "hub" in message:
                self.connect(*message["hub"])
            elif "ask" in message:
                self.tell_hub({"ask": self.rank})
            elif "at" in message:
                self.at = message["at"]
            else:
                self.ended = self.ended or bool({"left", "raised", "follows"} & message.keys())
                self.tell_hub(message | self.place())

    def from_hub(self):
        messages = self.hub.read()
        if messages is None:
            self.hub = None
            if not self.hub_left and self.verdict is None and kernel.parent_alive(self.pid, self.pidfd):
                self.tell_parent({"rank": 0, "how": "vanished", "ports": [], **self.hub_place()})
            return True
        self.silent = 0.0
        for message in messages:
            if "hello" in message:
                self.hub_host = message["hello"]
            elif "verdict" in message:
                self.tell_parent(message["verdict"])
            else:
                self.hub_left = self.hub_left or message.get("left") == 0
                if message:
                    self.parent.send(message)
        return True

    def tell_parent(self, verdict):
        if self.verdict is None:
            self.verdict = verdict
            self.parent.send({"verdict": verdict})

    def parent_died(self):
        if not self.ended:
            killed = kernel.memory_kills() > self.memory_kills
            self.tell_hub({"killed": self.rank, "memory": killed, **self.place()})
        time.sleep(0.05)  # until what was sent is on its way

    # --- on the hub -------------------------------------------------------------------------------
    def accept(self):
        connection, _ = self.listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.clients) < 2 * self.size:
            self.clients[Lines(connection)] = None
        else:
            connection.close()

    def from_client(self, client):
        messages = client.read()
        for message in messages or []:
            if self.clients[client] is None:
                rank = message.get("rank")
                if message.get("token") != self.token or not isinstance(rank, int) or not 0 < rank < self.size:
                    messages = None
                    break
                self.clients[client] = rank
                self.ranks[rank] = Rank(str(message.get("host")))
                client.send({"hello": self.host})
            else:
                self.at_hub(self.clients[client], message)
        if messages is None:
            rank = self.clients.pop(client)
            client.socket.close()
            if rank is not None and not self.ranks[rank].ended:
                self.lose(rank, "vanished")

    def at_hub(self, number, message):
        rank = self.ranks[number]
        rank.silent = 0.0
        if "beat" in message:
            rank.hear(message)
            if number:  # an answer, by which the other side knows that the hub is there
                self.send_to(number, {})
        elif "ask" in message:
            self.send_to(number, {"table": {n: r.beat.get("progress", 0) for n, r in self.ranks.items()}})
        elif "left" in message:
            rank.ended = True
            self.send_all({"left": number, "updates": message["left"]})
        elif "follows" in message:  # it ends because of another rank
            rank.ended = True
        elif "raised" in message:
            rank.hear(message | {"stopped": 0.0})
            self.lose(number, "raised", text=message["raised"])
        elif "killed" in message:
            rank.hear(message | {"stopped": 0.0})
            self.lose(number, "killed", memory=message["memory"])

    def lose(self, number, how, **more):
        rank = self.ranks[number]
        rank.ended = True
        if self.verdict is None:
            ports = sorted({port for other in self.ranks.values() for port in other.ports})
            found = {"rank": number, "host": rank.host, "how": how, "ports": ports, **rank.place(), **more}
            self.tell_parent(found)
            self.send_all({"verdict": found})

    def notice(self):
        """Name the ranks that others have been waiting for."""
        there = {n: r for n, r in self.ranks.items() if r.beat and not r.ended}
        if len(there) < self.size or self.verdict is not None:
            return
        first = min(r.beat["progress"] for r in there.values())
        late = [n for n, r in there.items() if r.beat["progress"] == first]
        waiting = [n for n in there if n not in late]
        still = min((there[n].beat["for"] for n in late), default=0.0)
        longest = max(r.longest for r in there.values())
        if not waiting or min(there[n].beat["for"] for n in waiting) < max(WAITING, 3 * longest) or still < WAITING:
            return
        key, seconds = (first, *late), min(there[n].beat["for"] for n in waiting)
        if seconds < self.noticed.get(key, 0.0):
            return
        self.noticed = {key: 4 * seconds}
        n = late[0]
        self.send_all(
            {"waiting": {"rank": n, "host": there[n].host, "late": late, "seconds": seconds, **there[n].place()}}
        )

    def send_to(self, number, message):
        for client, rank in self.clients.items():
            if rank == number:
                client.send(message)
        if number == 0:
            self.parent.send(message)

    def send_all(self, message):
        for client, rank in list(self.clients.items()):
            if rank is not None:
                client.send(message)
        if "verdict" not in message:
            self.parent.send(message)


def main():
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # it ends when its rank has ended
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = Lines(socket.socket(fileno=int(sys.argv[1])))
    messages: Any = []
    while not messages:
        messages = parent.read()
        if messages is None:
            return
    watcher = Watcher(parent, messages[0], mmap.mmap(int(sys.argv[2]), PLACE.size))
    watcher.hear_parent(messages[1:])
    watcher.run()


if __name__ == "__main__":
    main()
