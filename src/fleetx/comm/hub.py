"""The hub, which runs in the watcher of rank 0. It decides which rank was lost first, and tells all watchers.

    beat                              where a rank is in its training, and how long it has been there
    left, follows, gave up, raised    a rank announces that it ends
    killed, stopped                   what its watcher saw
    doubt                             a rank has lost a connection: is any rank lost? Answered once every rank that is
                                      not known to have ended has replied, which a dying rank cannot do

No torch here: `watcher.py` imports this file without the package.
"""

from collections.abc import Callable
from typing import Any

SILENT = 4.6  # seconds that a watcher may be silent
WAITING = 4.2  # seconds after which a rank that others wait for is reported
IDLE = 1.4  # a standstill also needs this many seconds in which no rank computes or has anything on the network
SHOWN = 8  # ranks listed in a report of a standstill: the message must not grow with the job
CONNECT = 30.0  # seconds to reach the hub
LAST_WORDS = ("raised", "gave up", "killed", "stopped")  # ways to end that the other ranks must hear about


class Rank:
    """What the hub knows about a rank."""

    def __init__(self, host: str):
        self.host = host
        self.beat: dict[str, Any] = {}
        self.silent = 0.0  # seconds since its last message, not counting those in which the hub slept
        self.ports: list[int] = []
        self.ended = False
        self.longest = 0.0  # the most seconds that it has stayed in one place before

    def hear(self, message: dict[str, Any]) -> None:
        if self.beat and message["progress"] != self.beat["progress"]:
            self.longest = max(self.longest, self.beat["for"])
        self.beat = message
        self.ports = message.get("ports", self.ports)

    def place(self) -> dict[str, Any]:
        return {key: self.beat.get(key) for key in ("steps", "doing", "for", "at")}


class Hub:
    """Knows all ranks. `send` takes a rank and a message for its watcher."""

    def __init__(self, size: int, send: Callable[[int, dict[str, Any]], None]):
        self.size, self.send = size, send
        self.ranks: dict[int, Rank] = {}
        self.verdict: dict[str, Any] | None = None
        self.left: list[dict[str, Any]] = []  # messages about ranks that ended normally
        self.noticed: dict[Any, float] = {}  # what was reported, and after how many seconds to report it again
        self.doubts: dict[int, tuple[int, set[int]]] = {}  # by asking rank: its question's number, who has yet to reply
        self.age = 0.0  # seconds

    def join(self, number: int, host: str) -> None:
        self.ranks[number] = Rank(host)
        for message in self.left:
            self.send(number, message)
        for who, (question, _) in self.doubts.items():
            self.send(number, {"answer": [who, question]})
        if self.verdict is not None:
            self.send(number, {"verdict": self.verdict})

    def tell_all(self, message: dict[str, Any]) -> None:
        for number in list(self.ranks):
            self.send(number, message)

    # --- what arrives -----------------------------------------------------------------------------
    def hear(self, number: int, message: dict[str, Any]) -> None:
        rank = self.ranks[number]
        rank.silent = 0.0
        if "beat" in message:
            rank.hear(message)
            self.send(number, {})  # tells the watcher that the hub is alive
        elif "ask" in message:
            self.send(number, {"table": {n: r.beat.get("progress", 0) for n, r in self.ranks.items()}})
        elif "doubt" in message:
            self._ask_everybody(number, message["doubt"])
        elif "here" in message:
            who, question = message["here"]
            if self.doubts.get(who, (None,))[0] == question:
                self._answered(who, number)
        elif "left" in message:
            self.left.append({"left": number, "updates": message["left"]})
            self.tell_all(self.left[-1])
            self._end(number)
        elif "follows" in message:  # it ends because of another rank
            self._end(number)
        for how in LAST_WORDS:
            if how in message:
                rank.hear(message)
                self.lose(number, how, text=message[how], memory=message.get("memory", False))

    def _end(self, number: int) -> None:
        self.ranks[number].ended = True
        for who in list(self.doubts):
            self._answered(who, number)

    def lose(self, number: int, how: str, **more: Any) -> None:
        rank = self.ranks.setdefault(number, Rank("?"))
        if self.verdict is None and not rank.ended:
            ports = sorted({port for other in self.ranks.values() for port in other.ports})
            self.verdict = {"rank": number, "host": rank.host, "how": how, "ports": ports, **rank.place(), **more}
            self.tell_all({"verdict": self.verdict})
        self._end(number)

    # --- doubts -----------------------------------------------------------------------------------
    def _ask_everybody(self, number: int, question: int) -> None:
        waits = {n for n in range(self.size) if n not in self.ranks or not self.ranks[n].ended}
        self.doubts[number] = question, waits
        self.tell_all({"answer": [number, question]})

    def _answered(self, who: int, number: int) -> None:
        question, waits = self.doubts[who]
        waits.discard(number)
        if not waits:
            del self.doubts[who]
            self.send(who, {"nobody": question, "late": self._late()})

    # --- the clock --------------------------------------------------------------------------------
    def look(self, passed: float) -> None:
        """Find the ranks that are silent or late, after `passed` more seconds."""
        self.age += passed
        for number, rank in list(self.ranks.items()):
            rank.silent += passed
            if not rank.ended and rank.silent > SILENT and number:
                self.lose(number, "silent")
        if self.doubts and self.age > CONNECT:
            for number in set(range(self.size)) - self.ranks.keys():
                self.lose(number, "silent")
        self._notice()

    def _late(self) -> dict[str, Any] | None:
        """The ranks that others wait for."""
        there = {n: r for n, r in self.ranks.items() if r.beat and not r.ended}
        first = min((r.beat["progress"] for r in there.values()), default=0)
        late = [n for n, r in there.items() if r.beat["progress"] == first]
        waiting = [r.beat["for"] for n, r in there.items() if n not in late]
        if len(there) < self.size or not waiting:
            return None
        n = late[0]
        return {"rank": n, "host": there[n].host, "late": late, "seconds": min(waiting), **there[n].place()}

    def _notice(self) -> None:
        """Report ranks that have kept others waiting for too long."""
        found = self._late() if self.verdict is None else None
        if found is None:
            self._standstill()
            return
        seconds, key = found["seconds"], (self.ranks[found["rank"]].beat["progress"], *found["late"])
        still = min(self.ranks[n].beat["for"] for n in found["late"])
        longest = max(rank.longest for rank in self.ranks.values())
        if min(seconds, still) < WAITING or seconds < max(3 * longest, self.noticed.get(key, 0.0)):
            return
        self.noticed = {key: 4 * seconds}
        self.tell_all({"waiting": found})

    def _standstill(self) -> None:
        """Report if all ranks are at the same point of the training, waiting for each other."""
        there = {n: r for n, r in self.ranks.items() if r.beat and not r.ended}
        if self.verdict is not None or len(there) < self.size:
            return
        seconds, key = min(r.beat["for"] for r in there.values()), there[0].beat["progress"]
        longest = max(rank.longest for rank in there.values())
        idle = min(r.beat.get("idle", 0.0) for r in there.values())
        if idle >= IDLE and seconds >= max(WAITING, 3 * longest, self.noticed.get(key, 0.0)):
            self.noticed = {key: 4 * seconds}
            places = [{"rank": n, "host": r.host, **r.place()} for n, r in sorted(there.items())]
            self.tell_all({"standstill": places[:SHOWN], "seconds": seconds})
