"""Several nodes: how they rendezvous, agree on the next attempt, and tell each other when one fails.

They share keys in one store, which node 0 hosts at --master:

    claimed/NODE           number of fleetruns started as that node: must be 1
    joined/ATTEMPT         number of nodes ready for that attempt; more than 0 makes the others restart
    joined/ATTEMPT/NODE    the settings of that node: {"address", "workers", "nodes"}
    store/ATTEMPT          the separate store for the workers of that attempt: {"port", "run_id"}
    heartbeat/NODE         counter; node 0 aborts when it stops increasing
    done/ATTEMPT           number of nodes whose workers have succeeded
    failed                 why the first node aborted; makes all others stop
    failures/NODE          the failed workers of that node, written once it has stopped
    left/NODE              this node no longer needs the store; node 0 leaves last

Every wait polls, so that Ctrl-C works and a failure of another node is noticed during all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from fleetx.base.call_with_timeout import CallerThread, NoAnswerError
from fleetx.errors import LaunchError
from fleetx.launch.environment import endpoints_of
from fleetx.launch.job import Attempt, Job
from fleetx.launch.rendezvous import STORE_TIMEOUT, FleetrunRendezvous, host_store
from fleetx.launch.report import Failure
from fleetx.launch.sockets import listen, port_of

POLL_EVERY = 0.05  # seconds
QUIET_WAIT = 5.0  # seconds of waiting before we print what for
LOST_AFTER = 30.0  # seconds without an answer (node 0) or a heartbeat (other nodes) until a node counts as lost
HEARTBEAT_EVERY = 5.0  # seconds

Result = TypeVar("Result")


class NodeFailedError(Exception):
    """Another node has aborted; the text says which one and why."""


class MultiNodeRendezvous(FleetrunRendezvous):
    def __init__(self, job: Job, *, print_status: Callable[[str], None]):
        assert job.master is not None
        self._job = job
        self._print_status = print_status
        self._host, self._port = job.master
        self._number = -1  # of the attempt
        self._store: TCPStore | None = None
        self._caller = CallerThread()
        self._reported_done = -1
        self._next_heartbeat = 0.0
        self._heartbeats: dict[int, tuple[int, float]] = {}  # by node: its counter, and when it last changed
        self._failures: list[Failure] = []

    # ------------------------------------------------------------------ rendezvous

    def next_rendezvous(self) -> RendezvousInfo:
        self._number += 1
        self._heartbeats.clear()  # there are none during the rendezvous
        number, job = self._number, self._job
        with self._lost_node_0():
            if self._store is None:
                self._open_store()
                if self._add(f"claimed/{job.rank}", 1) > 1:
                    raise LaunchError(f"--rank {job.rank} is used by two nodes; give every node a different --rank")
            settings = {"address": job.address or self._own_address(), "workers": job.workers, "nodes": job.nodes}
            self._set(f"joined/{number}/{job.rank}", json.dumps(settings))
            self._add(f"joined/{number}", 1)
            nodes = self._wait_for_all_nodes(number)
            self._check_equal(nodes)
            if job.rank == 0:
                listener = listen(self._host)
                shared: dict[str, Any] = {"port": port_of(listener), "run_id": os.urandom(6).hex()}
                store = host_store(listener, host=self._host)
                self._set(f"store/{number}", json.dumps(shared))
            else:
                self._wait_until(lambda: self._has(f"store/{number}"), awaiting=lambda: "node 0 to open a store")
                shared = json.loads(self._get(f"store/{number}"))
                store = self._connect(shared["port"])
        self.attempt = Attempt(
            number=number,
            run_id=self.attempt.run_id if number else shared["run_id"],
            master_addr=self._host,
            master_port=shared["port"],
            endpoints=endpoints_of([node["address"] for node in nodes], workers=job.workers),
            nodes=job.nodes,
            node=job.rank,
            slots=tuple(range(job.workers)),
            restarts=number,
        )
        return RendezvousInfo(store, job.rank, job.nodes, RendezvousStoreInfo(self._host, shared["port"]))

    def _open_store(self) -> None:
        if self._job.rank == 0:
            self._store = host_store(listen(self._host, port=self._port), host=self._host)
        else:
            self._wait_until(self._master_listens, awaiting=lambda: f"node 0 at {self._host}:{self._port}")
            self._store = self._connect(self._port)

    def _connect(self, port: int) -> TCPStore:
        connect = partial(TCPStore, self._host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
        return self._caller.call(connect, seconds=LOST_AFTER)

    def _master_listens(self) -> bool:
        try:
            socket.create_connection((self._host, self._port), timeout=2).close()
        except OSError:
            return False
        return True

    def _own_address(self) -> str:
        """The address from which this node connects to the master."""
        if self._job.rank == 0:
            return self._host
        with socket.create_connection((self._host, self._port), timeout=LOST_AFTER) as connection:
            return str(connection.getsockname()[0])

    def _wait_for_all_nodes(self, number: int) -> list[dict[str, Any]]:
        """Returns the settings of every node."""
        keys = [f"joined/{number}/{node}" for node in range(self._job.nodes)]

        def missing() -> str:
            nodes = [str(node) for node, key in enumerate(keys) if not self._has(key)]
            return f"node {', '.join(nodes)} to join at {self._host}:{self._port}"

        self._wait_until(lambda: self._add(f"joined/{number}", 0) >= len(keys), awaiting=missing)
        return [json.loads(self._get(key)) for key in keys]

    def _check_equal(self, nodes: Sequence[dict[str, Any]]) -> None:
        ours = nodes[self._job.rank]
        for node, theirs in enumerate(nodes):
            for setting in ("workers", "nodes"):
                if theirs[setting] != ours[setting]:
                    raise LaunchError(
                        f"node {node} was started with {theirs[setting]} {setting}, node {self._job.rank} with "
                        f"{ours[setting]}; use the same --gpus, --nproc_per_node, --ips and --nnodes on every node"
                    )

    # ------------------------------------------------------------------ while the workers run

    def num_nodes_waiting(self) -> int:
        """torchelastic calls this ten times a second, and restarts the workers if the result is not 0."""
        with self._lost_node_0():
            self._raise_if_failed()
            self._heartbeat()
            waiting = self._add(f"joined/{self._number + 1}", 0)
        if waiting:
            self._print_status(f"another node requested restart {self._number + 1} of {self._job.max_restarts}")
        return waiting

    def _heartbeat(self) -> None:
        """Show that this node is alive; on node 0, raise if another node is not. It would wait for that node forever.

        The other nodes need not check: if node 0 is gone, the store does not answer, and node 0 tells them about the
        rest. A node sends no heartbeat while it stops its workers for a restart.
        """
        now = time.monotonic()
        if now < self._next_heartbeat:
            return
        self._next_heartbeat = now + HEARTBEAT_EVERY
        self._add(f"heartbeat/{self._job.rank}", 1)
        limit = LOST_AFTER + self._job.stop_timeout
        for node in range(1, self._job.nodes) if self._job.rank == 0 else ():
            count = self._add(f"heartbeat/{node}", 0)
            last_count, since = self._heartbeats.get(node, (-1, now))
            if count != last_count:
                self._heartbeats[node] = (count, now)
            elif now - since > limit:
                raise LaunchError(f"lost node {node}: its fleetrun or its machine has not responded for {limit:g} s")

    def all_nodes_done(self) -> bool:
        with self._lost_node_0():
            increment = int(self._reported_done < self._number)
            self._reported_done = self._number
            return self._add(f"done/{self._number}", increment) >= self._job.nodes

    def add_failures(self, failures: Sequence[Failure]) -> None:
        self._failures += failures

    # ------------------------------------------------------------------ the end

    def abort(self, reason: str) -> None:
        """Stop all other nodes. Only the first reason is kept."""
        with contextlib.suppress(DistError, NoAnswerError):
            if self._store is not None and not self._has("failed"):
                self._set("failed", f"node {self._job.rank}: {reason}")

    def leave(self, *, failed: bool) -> list[Failure]:
        """Leave the store; after a failure, return the failures of the other nodes."""
        failures: list[Failure] = []
        if self._store is None:
            return failures
        with contextlib.suppress(DistError, NoAnswerError):
            nodes = [node for node in range(self._job.nodes) if self._has(f"joined/0/{node}")]
            self._set(f"failures/{self._job.rank}", json.dumps([asdict(failure) for failure in self._failures]))
            if failed:
                self._wait_for_keys("failures", nodes, seconds=self._job.stop_timeout + 2.0)  # they stop their workers
                silent = [node for node in nodes if not self._has(f"failures/{node}")]
                if silent:
                    names = ", ".join(map(str, silent))
                    self._print_status(f"no answer from node {names}, which may have failed first")
                nodes = [node for node in nodes if node not in silent]
                for node in nodes:
                    if node != self._job.rank:
                        failures += [Failure(**values) for values in json.loads(self._get(f"failures/{node}"))]
            self._set(f"left/{self._job.rank}", "")
            if self._job.rank == 0:
                self._wait_for_keys("left", nodes, seconds=QUIET_WAIT)
        return failures

    def _wait_for_keys(self, name: str, nodes: Sequence[int], *, seconds: float) -> None:
        self._poll(lambda: all(self._has(f"{name}/{node}") for node in nodes), seconds=seconds, raise_if_failed=False)

    # ------------------------------------------------------------------ the store

    @contextlib.contextmanager
    def _lost_node_0(self) -> Iterator[None]:
        """Turn errors of the store into a LaunchError."""
        try:
            yield
        except (DistError, NoAnswerError, OSError):
            address = f"{self._host}:{self._port}"
            raise LaunchError(f"lost node 0 at {address}: its fleetrun or its machine does not respond") from None

    def _call(self, method: Callable[..., Result], *arguments: Any) -> Result:
        return self._caller.call(method, self._store, *arguments, seconds=LOST_AFTER)

    def _has(self, key: str) -> bool:
        return self._call(TCPStore.check, [key])

    def _set(self, key: str, value: str) -> None:
        self._call(TCPStore.set, key, value)

    def _get(self, key: str) -> str:
        return self._call(TCPStore.get, key).decode()

    def _add(self, key: str, amount: int) -> int:
        return self._call(TCPStore.add, key, amount)

    def _raise_if_failed(self) -> None:
        if self._store is not None and self._has("failed"):
            raise NodeFailedError(self._get("failed"))

    def _wait_until(self, ready: Callable[[], bool], *, awaiting: Callable[[], str]) -> None:
        """Wait for at most --join_timeout seconds, and after a while print what for."""
        quiet = min(QUIET_WAIT, self._job.join_timeout)
        if self._poll(ready, seconds=quiet):
            return
        self._print_status(f"waiting for {awaiting()}")
        if not self._poll(ready, seconds=self._job.join_timeout - quiet):
            raise LaunchError(f"timed out after {self._job.join_timeout} s waiting for {awaiting()}")

    def _poll(self, ready: Callable[[], bool], *, seconds: float, raise_if_failed: bool = True) -> bool:
        deadline = time.monotonic() + seconds
        while not ready():
            if raise_if_failed:
                self._raise_if_failed()
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_EVERY)
        return True
