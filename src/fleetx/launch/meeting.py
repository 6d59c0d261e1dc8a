"""What the nodes of a job agree on: who takes part, when the next attempt starts, when and why everything stops.

Node 0 keeps the Meeting. All nodes call the same methods: node 0 directly, the others over the network
(meeting_ends.py). There are no sockets here, and no method waits: a node that waits for something polls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LOST_AFTER = 15.0  # seconds of silence until a node counts as lost
GONE_AFTER = 2.0  # the same once its connection is closed, as when its fleetrun is killed
GATHER = 10.0  # seconds without a new node until an elastic job starts with fewer than its maximum

SAME = {  # settings that must be the same on all nodes -> what to call them
    "workers": "workers", "nodes": "nodes", "elastic": "--elastic", "max_restarts": "--max_restarts",
    "version": "fleetx",
}  # fmt: skip


class MeetingError(Exception):
    """A call was rejected; the message says why."""


@dataclass
class Member:
    """One node; `token` identifies its fleetrun."""

    token: str
    settings: dict[str, Any]
    ready_for: int  # the attempt that it waits for or takes part in
    seen: float
    away_since: float | None = None  # when its connection closed
    failed: bool = False  # whether it waits because a worker failed there
    done: int = -1  # the last attempt in which its workers succeeded
    failures: list[dict[str, Any]] | None = None  # of all attempts, once it has stopped
    left: bool = False


class Meeting:
    def __init__(self, *, nodes: int, minimum: int, clock: Callable[[], float] = time.monotonic):
        self.nodes = nodes
        self.minimum = minimum
        self.elastic = minimum < nodes
        self._clock = clock
        self._lock = threading.RLock()  # between node 0's main thread and its server
        self._members: dict[int, Member] = {}
        self._last_join = clock()
        self._plan: dict[str, Any] | None = None  # of the last attempt that started
        self._change: str | None = None  # why the members are no longer those of the plan: `loss` or `resize`
        self._stop: dict[str, Any] | None = None
        self._lost: list[int] = []

    # ------------------------------------------------------------------ calls from nodes

    CALLS = ("join", "arrive", "look", "done", "stop", "depart", "report", "reports", "leave")

    def call(self, name: str, node: int, **arguments: Any) -> Any:
        """Handle a call from a node, a sign of life too. Raises MeetingError, or TypeError for wrong arguments."""
        if name not in self.CALLS:
            raise MeetingError("no such call")
        with self._lock:
            self._drop_lost()
            member = self._members.get(node)
            if member is not None and name != "join":
                member.seen = self._clock()
            elif name != "join":
                raise MeetingError(f"node {node} was considered lost, and the job continued without it")
            return getattr(self, name)(node, **arguments)

    def join(self, node: int, *, token: str, settings: dict[str, Any]) -> int:
        """Join, or rejoin after the connection was lost. Returns the number of the last attempt, or -1."""
        if not 0 <= node < self.nodes:
            raise MeetingError(f"--rank {node}: must be less than the number of nodes, {self.nodes}")
        if not isinstance(settings.get("address"), str):
            raise TypeError("settings")
        number = self._next() - 1
        member = self._members.get(node)
        if member is not None and member.token == token:
            member.seen, member.away_since = self._clock(), None
            return number
        if member is not None and not member.left:
            raise MeetingError(f"--rank {node} is used by two nodes; give every node a different --rank")
        for other, theirs in self._members.items():
            for name, title in SAME.items():
                if settings.get(name) != theirs.settings.get(name):
                    text = (
                        f"node {node} was started with {settings.get(name)} {title}, node {other} with "
                        f"{theirs.settings.get(name)}; start all nodes with the same options and the same fleetx"
                    )
                    if self._plan is None:
                        self.stop(0, reason=text)  # do not keep the others waiting for this node
                    raise MeetingError(text)
        self._members[node] = Member(token, settings, ready_for=number, seen=self._clock())
        self._last_join = self._clock()
        self._lost = [lost for lost in self._lost if lost != node]
        return number

    def arrive(self, node: int, *, attempt: int, failed: bool) -> None:
        """This node waits for `attempt`: none of its workers is running."""
        member = self._members[node]
        member.ready_for, member.failed = self._next(), failed and attempt == self._next()

    def look(self, node: int, *, attempt: int) -> dict[str, Any]:
        """What a node needs to know while it takes part in `attempt` or waits for it."""
        plan = self._plan
        in_plan = plan is not None and node in plan["members"] and plan["number"] >= attempt
        return {
            "stop": self._stop,
            "plan": plan if in_plan else None,
            "restart": self._restart(),
            "done": self._all_done(),
            "missing": [n for n in range(self.nodes) if n not in self._members or self._waited_for(n)],
        }

    def done(self, node: int, *, attempt: int) -> None:
        self._members[node].done = attempt

    def stop(self, node: int, *, reason: str, signal: int | None = None) -> None:
        """Stop all nodes. Only the first reason is kept."""
        self._stop = self._stop or {"node": node, "reason": reason, "signal": signal}

    def depart(self, node: int, *, reason: str, signal: int | None = None) -> None:
        """This node was told to stop: the others continue without it, if enough of them remain."""
        if not self.elastic or node == 0 or len(self._present()) - 1 < self.minimum:
            self.stop(node, reason=reason, signal=signal)
        else:
            self._members[node].left = True
            self._change = self._change or "resize"

    def report(self, node: int, *, failures: list[dict[str, Any]]) -> None:
        self._members[node].failures = failures

    def reports(self, node: int) -> dict[str, Any]:
        """The failures on all nodes, and the nodes that have not reported yet."""
        members = self._members.items()
        told = {str(number): member.failures for number, member in members if member.failures is not None}
        missing = [number for number, member in members if member.failures is None and not member.left]
        return {"failures": told, "missing": missing, "lost": self._lost}

    def leave(self, node: int) -> None:
        self._members[node].left = True

    # ------------------------------------------------------------------ only for node 0

    def disconnected(self, node: int, token: str) -> None:
        with self._lock:
            member = self._members.get(node)
            if member is not None and member.token == token:
                member.away_since = self._clock()

    def ready(self) -> list[int] | None:
        """The members of the next attempt, if it can start."""
        with self._lock:
            self._drop_lost()
            present = self._present()
            if self._stop or len(present) < self.minimum or any(self._waited_for(node) for node in present):
                return None
            gathering = self._plan is None and self._clock() - self._last_join < GATHER
            return None if gathering and len(present) < self.nodes else present

    def publish(self, members: list[int], **where: Any) -> bool:
        """Start the next attempt. Returns False if the members have changed since `ready`."""
        with self._lock:
            if self.ready() != members:
                return False
            failed = any(self._members[node].failed for node in members) and self._change is None
            restarts = (self._plan["restarts"] if self._plan else 0) + failed
            addresses = [self._members[node].settings["address"] for node in members]
            number = self._next()
            self._plan = {
                "number": number, "restarts": restarts, "members": members, "addresses": addresses, **where,
            }  # fmt: skip
            self._change = None
            for node in members:
                self._members[node].failed = False
            return True

    def everyone_left(self) -> bool:
        with self._lock:
            self._drop_lost()
            return all(member.left for node, member in self._members.items() if node != 0)

    # ------------------------------------------------------------------ internal

    def _next(self) -> int:
        return self._plan["number"] + 1 if self._plan else 0

    def _present(self) -> list[int]:
        return sorted(node for node, member in self._members.items() if not member.left)

    def _waited_for(self, node: int) -> bool:
        return self._members[node].ready_for < self._next()

    def _restart(self) -> str | None:
        """Why the running attempt must end: `failure`, `loss`, `resize`, or None."""
        if self._plan is None:
            return None
        waiting = [m for node, m in self._members.items() if not m.left and not self._waited_for(node)]
        if self._change:
            return self._change
        if any(member.failed for member in waiting):
            return "failure"
        running = self._plan["members"]
        busy = not any(self._members[node].done == self._plan["number"] for node in running if node in self._members)
        return "resize" if waiting and busy else None  # once the first workers are done, no node may join

    def _all_done(self) -> bool:
        plan = self._plan
        return plan is not None and all(
            node in self._members and self._members[node].done == plan["number"] for node in plan["members"]
        )

    def _drop_lost(self) -> None:
        now = self._clock()
        for node in [n for n in self._present() if n != 0]:
            member = self._members[node]
            gone = member.away_since is not None and now - member.away_since > GONE_AFTER
            if not gone and now - member.seen <= LOST_AFTER:
                continue
            if self._plan and member.done == self._plan["number"]:
                member.left = True  # its work is done
                continue
            del self._members[node]
            self._lost.append(node)
            reason = f"lost node {node}: its fleetrun or its machine does not respond"
            if not self.elastic:
                self.stop(0, reason=reason)
            elif self._plan and node in self._plan["members"]:
                self._change = "loss"
