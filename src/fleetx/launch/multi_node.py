"""Several nodes: how they rendezvous, agree on the next attempt, and tell each other when one fails.

They meet at --master, where node 0 listens (meeting.py) and hosts a separate store for the workers of each attempt.
Every wait polls, so that Ctrl-C works and a failure of another node is noticed while waiting.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from torch.distributed import HashStore, Store
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from fleetx import __version__
from fleetx.errors import LaunchError
from fleetx.launch.environment import endpoints_of
from fleetx.launch.job import Attempt, Job
from fleetx.launch.meeting import GONE_AFTER, LOST_AFTER, Meeting, MeetingError
from fleetx.launch.meeting_ends import MeetingClient, MeetingServer, NoMeetingError
from fleetx.launch.rendezvous import FleetrunRendezvous, host_store
from fleetx.launch.report import Failure
from fleetx.launch.sockets import listen, port_of

POLL_EVERY = 0.05  # seconds
TICK_EVERY = 1.0  # seconds between signs of life while this node does something else
QUIET_WAIT = 5.0  # seconds before we print what we are waiting for
Found = TypeVar("Found")


class NodeFailedError(Exception):
    """Another node has stopped the job; the text says which one and why."""

    def __init__(self, text: str, *, signal: int | None):
        super().__init__(text)
        self.signal = signal  # the signal that stopped it


class JobFinishedError(Exception):
    """The job finished before this node took part."""


class MultiNodeRendezvous(FleetrunRendezvous):
    def __init__(self, job: Job, *, print_status: Callable[[str], None]):
        assert job.master is not None
        self._job = job
        self._print_status = print_status
        self._host, self._port = job.master
        self._token = os.urandom(16).hex()  # of this fleetrun
        self._number = -1  # of the attempt
        self._meeting: Meeting | None = None  # on node 0
        self._server: MeetingServer | None = None
        self._client: MeetingClient | None = None  # on the others
        self._store: Store | None = None  # of the workers
        self._joined = self._failed = False
        self._reported_done = -1
        self._next_tick = 0.0
        self._failures: list[Failure] = []

    # ------------------------------------------------------------------ rendezvous

    def next_rendezvous(self) -> RendezvousInfo:
        if not self._joined:
            self._join()
        failed, self._failed = self._failed, False
        self._call("arrive", attempt=self._number + 1, failed=failed)
        plan = self._start() if self._job.rank == 0 else self._wait_for_plan()
        self._number = plan["number"]
        members = plan["members"]
        self.attempt = Attempt(
            number=plan["number"],
            run_id=plan["run_id"],
            master_addr=self._host,
            master_port=plan["port"],
            endpoints=endpoints_of(plan["addresses"], workers=self._job.workers),
            nodes=len(members),
            node=members.index(self._job.rank),
            slots=tuple(range(self._job.workers)),
            restarts=plan["restarts"],
        )
        if self._job.elastic:
            self._print_status(f"{len(members)} of {self._job.nodes} nodes take part: {', '.join(map(str, members))}")
        where = RendezvousStoreInfo(self._host, plan["port"])
        return RendezvousInfo(self._store or HashStore(), self.attempt.node, self.attempt.nodes, where)

    def _join(self) -> None:
        job = self._job
        if job.rank == 0:
            self._meeting = Meeting(nodes=job.nodes, minimum=job.elastic or job.nodes)
            listener = listen(self._host, port=self._port)
            self._server = MeetingServer(listener, self._meeting, secret=job.secret, print_status=self._print_status)
        else:
            self._wait_until(self._connect, awaiting=lambda: f"node 0 at {self._host}:{self._port}")
        self._number = self._call("join", **self._introduction())
        self._joined = True

    def _introduction(self) -> dict[str, Any]:
        job = self._job
        address = job.address or (self._client.address if self._client else self._host)
        settings = {
            "address": address, "workers": job.workers, "nodes": job.nodes, "elastic": job.elastic,
            "max_restarts": job.max_restarts, "version": __version__,
        }  # fmt: skip
        return {"token": self._token, "settings": settings}

    def _connect(self) -> bool:
        try:
            self._client = MeetingClient(self._host, self._port, secret=self._job.secret)
        except NoMeetingError:
            return False
        return True

    def _start(self) -> dict[str, Any]:
        """On node 0: wait for the others, then start the next attempt."""
        meeting = self._meeting
        assert meeting is not None
        members = self._wait_until(meeting.ready, awaiting=self._others)
        listener = listen(self._host)
        port = port_of(listener)
        self._store = host_store(listener, host=self._host)
        run_id = self.attempt.run_id if hasattr(self, "attempt") else os.urandom(6).hex()
        while not meeting.publish(members, port=port, run_id=run_id):
            members = self._wait_until(meeting.ready, awaiting=self._others)
        plan: dict[str, Any] = self._look()["plan"]
        return plan

    def _wait_for_plan(self) -> dict[str, Any]:
        def plan() -> dict[str, Any] | None:
            state = self._look(self._number + 1)
            if state["done"] and not state["plan"] and not hasattr(self, "attempt"):
                raise JobFinishedError
            return state["plan"]

        return self._wait_until(plan, awaiting=self._others)

    def _others(self) -> str:
        """What this node waits for; if nobody is missing, node 0 has yet to start the attempt."""
        missing = ", ".join(str(node) for node in self._look()["missing"]) or "0"
        return f"node {missing} to join at {self._host}:{self._port}"

    # ------------------------------------------------------------------ while the workers run

    def num_nodes_waiting(self) -> int:
        """torchelastic calls this ten times a second, and restarts the workers if the result is not 0."""
        state = self._look()
        self._raise_if_stopped(state)
        if not (why := state["restart"]):
            return 0
        self.resizing = why == "resize"
        if why == "failure":
            number = self.attempt.restarts + 1
            self._print_status(f"another node requested restart {number} of {self._job.max_restarts}")
        else:
            self._say_change(why)
        return 1

    def _say_change(self, why: str) -> None:
        self._print_status("a node was lost" if why == "loss" else "a node joins or leaves")

    def members_change(self, *, wait: bool) -> bool:
        """Whether the workers ended because a node came or went. With `wait`, wait until a lost node is noticed.

        Without --elastic, that stops the job, and this raises NodeFailedError.
        """

        def restart() -> str | None:
            state = self._look()
            self._raise_if_stopped(state)
            return state["restart"]

        why = self._poll(restart, seconds=LOST_AFTER + GONE_AFTER) if wait else restart()
        if why is None or why == "failure":
            return False
        self._say_change(why)
        return True

    def all_nodes_done(self) -> bool:
        if self._reported_done < self._number:
            self._reported_done = self._number
            self._call("done", attempt=self._number)
        return bool(self._look()["done"])

    def add_failures(self, failures: Sequence[Failure]) -> None:
        self._failures += failures
        self._failed = True

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._poll(lambda: time.monotonic() >= deadline, seconds=seconds + 1)

    def tick(self) -> None:
        if self._joined and time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + TICK_EVERY
            with contextlib.suppress(LaunchError):
                self._look()

    # ------------------------------------------------------------------ the end

    def abort(self, reason: str) -> None:
        """Stop all other nodes. Only the first reason is kept."""
        self._tell("stop", reason=f"node {self._job.rank}: {reason}")

    def depart(self, reason: str, *, signal: int) -> None:
        """This node stops: so do the others, unless --elastic lets them continue without it."""
        self._tell("depart", reason=f"node {self._job.rank}: {reason}", signal=signal)

    def leave(self, *, failed: bool) -> list[Failure]:
        """Leave the meeting; after a failure, return the failures of the other nodes."""
        failures: list[Failure] = []
        if not self._joined:
            return failures
        with contextlib.suppress(LaunchError):
            self._call("report", failures=[asdict(failure) for failure in self._failures])
            if failed:
                seconds = self._job.stop_timeout + GONE_AFTER + 1.0  # so that they can stop their workers
                self._poll(lambda: not self._call("reports")["missing"], seconds=seconds, raise_if_stopped=False)
                told = self._call("reports")
                silent = sorted({*told["missing"], *told["lost"]})
                if silent:
                    names = ", ".join(map(str, silent))
                    self._print_status(f"no answer from node {names}, which may have failed first")
                for node, values in told["failures"].items():
                    if int(node) != self._job.rank:
                        failures += [Failure(**value) for value in values]
            self._call("leave")
        if self._meeting is not None and self._server is not None:
            self._poll(self._meeting.everyone_left, seconds=QUIET_WAIT, raise_if_stopped=False)
            self._server.end()
        if self._client is not None:
            self._client.close()
        return failures

    def _tell(self, name: str, **arguments: Any) -> None:
        if self._joined:
            with contextlib.suppress(LaunchError):
                self._call(name, **arguments)

    # ------------------------------------------------------------------ the meeting

    def _look(self, attempt: int | None = None) -> dict[str, Any]:
        state: dict[str, Any] = self._call("look", attempt=self._number if attempt is None else attempt)
        return state

    def _call(self, name: str, **arguments: Any) -> Any:
        rank = self._job.rank
        try:
            if self._meeting is not None:
                return self._meeting.call(name, rank, **arguments)
            deadline = time.monotonic() + GONE_AFTER
            while True:
                assert self._client is not None
                try:
                    return self._client.call(name, rank, **arguments)
                except (OSError, EOFError):  # perhaps only the connection was lost
                    self._client.close()
                    while not self._connect():
                        if time.monotonic() > deadline:
                            raise self._lost_node_0() from None
                        time.sleep(POLL_EVERY)
                    if self._joined:
                        with contextlib.suppress(OSError, EOFError):
                            self._client.call("join", rank, **self._introduction())
                    if time.monotonic() > deadline:
                        raise self._lost_node_0() from None
        except MeetingError as error:
            raise LaunchError(str(error)) from None

    def _lost_node_0(self) -> LaunchError:
        where = f"{self._host}:{self._port}"
        return LaunchError(f"lost node 0 at {where}: its fleetrun or its machine does not respond")

    def _raise_if_stopped(self, state: dict[str, Any]) -> None:
        if stop := state["stop"]:
            raise NodeFailedError(stop["reason"], signal=stop["signal"])

    def _wait_until(self, ready: Callable[[], Found | None], *, awaiting: Callable[[], str]) -> Found:
        """Wait until `ready`, at most --join_timeout seconds. After a while, print what we are waiting for."""
        quiet = min(QUIET_WAIT, self._job.join_timeout)
        if found := self._poll(ready, seconds=quiet):
            return found
        self._print_status(f"waiting for {awaiting()}")
        if found := self._poll(ready, seconds=self._job.join_timeout - quiet):
            return found
        raise LaunchError(f"timed out after {self._job.join_timeout} s waiting for {awaiting()}")

    def _poll(
        self, ready: Callable[[], Found | None], *, seconds: float, raise_if_stopped: bool = True
    ) -> Found | None:
        """Call `ready` until its result is true or `seconds` have passed, and return the last result."""
        deadline = time.monotonic() + seconds
        while not (found := ready()):
            if raise_if_stopped and self._joined:
                self._raise_if_stopped(self._look())
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_EVERY)
        return found
