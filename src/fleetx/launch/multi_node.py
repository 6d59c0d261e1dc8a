"""Many nodes: where they meet, how they agree on the next attempt, and what they tell each other when one fails.

All of it is keys in one store that node 0 holds at --master:

    seat/NODE              counts who claims to be that node: one
    joined/ATTEMPT         counts the nodes that are ready for that attempt; more than 0 asks the others to restart
    joined/ATTEMPT/NODE    what this node brings: {"address", "workers", "nodes"}
    store/ATTEMPT          where the workers of that attempt meet, in a store of their own: {"port", "run_id"}
    alive/NODE             counts the beats of that node; node 0 gives up when one has no more
    done/ATTEMPT           counts the nodes whose workers have succeeded
    failed                 the first node to give up says so, and why: all others stop
    cause/NODE             the failures of that node, when it has stopped
    gone/NODE              this node needs the store no more; node 0 leaves last

Every wait is a loop of short questions, so that Ctrl-C works and the failure of another node is heard in all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from fleetx.base.call_with_timeout import SilenceError, Voice
from fleetx.errors import LaunchError
from fleetx.launch.environment import endpoints_of
from fleetx.launch.job import Job, World
from fleetx.launch.rendezvous import STORE_TIMEOUT, Rendezvous, serve
from fleetx.launch.report import Failure
from fleetx.launch.sockets import listen, port_of

ASK_EVERY = 0.05  # seconds
PATIENCE = 5.0  # seconds of waiting before we say for what
SILENCE = 30.0  # seconds without an answer after which node 0 is lost, or without a beat, another node
BEAT = 5.0  # seconds between the beats of a node


class NodeFailedError(Exception):
    """Another node has given up; the text says which and why."""


class Meeting(Rendezvous):
    def __init__(self, job: Job, *, say: Callable[[str], None]):
        assert job.master is not None
        self._job = job
        self._say = say
        self._host, self._port = job.master
        self._attempt = -1
        self._store: TCPStore | None = None
        self._voice = Voice()
        self._told_done = -1
        self._next_beat = 0.0
        self._heard: dict[int, tuple[int, float]] = {}  # by node: its beats, and when we last found a new one
        self._failures: list[Failure] = []

    # ------------------------------------------------------------------ meeting

    def next_rendezvous(self) -> RendezvousInfo:
        self._attempt += 1
        self._heard.clear()  # nobody beats while they meet
        attempt, job = self._attempt, self._job
        with self._talking():
            if self._store is None:
                self._open()
                if self._count(f"seat/{job.rank}", 1) > 1:
                    raise LaunchError(f"node {job.rank} is there already: give each node its own --rank")
            mine = {"address": job.address or self._own_address(), "workers": job.workers, "nodes": job.nodes}
            self._set(f"joined/{attempt}/{job.rank}", json.dumps(mine))
            self._count(f"joined/{attempt}", 1)
            everyone = self._everyone(attempt)
            self._compare(everyone)
            if job.rank == 0:
                listener = listen(self._host)
                facts: dict[str, Any] = {"port": port_of(listener), "run_id": os.urandom(6).hex()}
                place = serve(listener, host=self._host)
                self._set(f"store/{attempt}", json.dumps(facts))
            else:
                self._until(lambda: self._has(f"store/{attempt}"), for_what=lambda: "node 0 to open a store")
                facts = json.loads(self._get(f"store/{attempt}"))
                place = self._join(facts["port"])
        self.world = World(
            attempt=attempt,
            run_id=self.world.run_id if attempt else facts["run_id"],
            master_addr=self._host,
            master_port=facts["port"],
            endpoints=endpoints_of([node["address"] for node in everyone], workers=job.workers),
        )
        return RendezvousInfo(place, job.rank, job.nodes, RendezvousStoreInfo(self._host, facts["port"]))

    def _open(self) -> None:
        if self._job.rank == 0:
            self._store = serve(listen(self._host, port=self._port), host=self._host)
        else:
            self._until(self._master_answers, for_what=lambda: f"node 0 at {self._host}:{self._port}")
            self._store = self._join(self._port)

    def _join(self, port: int) -> TCPStore:
        store = partial(TCPStore, self._host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
        return self._voice.ask(store, seconds=SILENCE)

    def _master_answers(self) -> bool:
        try:
            socket.create_connection((self._host, self._port), timeout=2).close()
        except OSError:
            return False
        return True

    def _own_address(self) -> str:
        """The address of this node on its way to the master."""
        if self._job.rank == 0:
            return self._host
        with socket.create_connection((self._host, self._port), timeout=SILENCE) as connection:
            return str(connection.getsockname()[0])

    def _everyone(self, attempt: int) -> list[dict[str, Any]]:
        keys = [f"joined/{attempt}/{node}" for node in range(self._job.nodes)]

        def missing() -> str:
            nodes = [str(node) for node, key in enumerate(keys) if not self._has(key)]
            return f"node {', '.join(nodes)} to join at {self._host}:{self._port}"

        self._until(lambda: self._count(f"joined/{attempt}", 0) >= len(keys), for_what=missing)
        return [json.loads(self._get(key)) for key in keys]

    def _compare(self, everyone: Sequence[dict[str, Any]]) -> None:
        mine = everyone[self._job.rank]
        for node, theirs in enumerate(everyone):
            for what in ("workers", "nodes"):
                if theirs[what] != mine[what]:
                    raise LaunchError(
                        f"node {node} was started with {theirs[what]} {what}, node {self._job.rank} with {mine[what]}; "
                        f"give the same --gpus or --nproc_per_node and the same --ips or --nnodes on every node"
                    )

    # ------------------------------------------------------------------ while the workers run

    def num_nodes_waiting(self) -> int:
        """torchelastic asks ten times a second, and restarts the workers if the answer is not 0."""
        with self._talking():
            self._listen_for_failure()
            self._beat()
            waiting = self._count(f"joined/{self._attempt + 1}", 0)
        if waiting:
            self._say(f"another node asks for restart {self._attempt + 1} of {self._job.max_restarts}")
        return waiting

    def _beat(self) -> None:
        """A machine that is gone says nothing: without this, node 0 would wait for it for ever.

        Nodes other than 0 need not listen: they lose node 0 when it does not answer, and hear from it of the rest. A
        node that stops its workers for a restart has no time to beat.
        """
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT
        self._count(f"alive/{self._job.rank}", 1)
        patience = SILENCE + self._job.stop_timeout
        for node in range(1, self._job.nodes) if self._job.rank == 0 else ():
            beats = self._count(f"alive/{node}", 0)
            known, since = self._heard.get(node, (-1, now))
            if beats != known:
                self._heard[node] = (beats, now)
            elif now - since > patience:
                raise LaunchError(f"lost node {node}: its fleetrun or its machine has been silent for {patience:g} s")

    def all_done(self) -> bool:
        with self._talking():
            news = int(self._told_done < self._attempt)
            self._told_done = self._attempt
            return self._count(f"done/{self._attempt}", news) >= self._job.nodes

    def share(self, failures: Sequence[Failure]) -> None:
        self._failures += failures

    # ------------------------------------------------------------------ the end

    def give_up(self, reason: str) -> None:
        """Stop all other nodes. The first reason stands."""
        with contextlib.suppress(DistError, SilenceError):
            if self._store is not None and not self._has("failed"):
                self._set("failed", f"node {self._job.rank}: {reason}")

    def leave(self, *, failed: bool) -> list[Failure]:
        """Say goodbye; after a failure, bring along what failed on the other nodes."""
        found: list[Failure] = []
        if self._store is None:
            return found
        with contextlib.suppress(DistError, SilenceError):
            nodes = [node for node in range(self._job.nodes) if self._has(f"joined/0/{node}")]
            self._set(f"cause/{self._job.rank}", json.dumps([failure.to_json() for failure in self._failures]))
            if failed:
                patience = self._job.stop_timeout + 2.0  # the others are stopping their workers meanwhile
                self._ask(lambda: all(self._has(f"cause/{node}") for node in nodes), seconds=patience, heeding=False)
                silent = [node for node in nodes if not self._has(f"cause/{node}")]
                if silent:
                    self._say(f"node {', '.join(map(str, silent))} does not answer: the first cause may be there")
                nodes = [node for node in nodes if node not in silent]
                for node in nodes:
                    if node != self._job.rank:
                        found += [Failure.from_json(text) for text in json.loads(self._get(f"cause/{node}"))]
            self._set(f"gone/{self._job.rank}", "")
            if self._job.rank == 0:
                self._ask(lambda: all(self._has(f"gone/{node}") for node in nodes), seconds=PATIENCE, heeding=False)
        return found

    # ------------------------------------------------------------------ words with the store

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except (DistError, SilenceError, OSError):
            where = f"{self._host}:{self._port}"
            raise LaunchError(f"lost node 0 at {where}: its fleetrun or its machine does not answer") from None

    def _has(self, key: str) -> bool:
        assert self._store is not None
        return self._voice.ask(self._store.check, [key], seconds=SILENCE)

    def _set(self, key: str, value: str) -> None:
        assert self._store is not None
        self._voice.ask(self._store.set, key, value, seconds=SILENCE)

    def _get(self, key: str) -> str:
        assert self._store is not None
        return self._voice.ask(self._store.get, key, seconds=SILENCE).decode()

    def _count(self, key: str, more: int) -> int:
        assert self._store is not None
        return self._voice.ask(self._store.add, key, more, seconds=SILENCE)

    def _listen_for_failure(self) -> None:
        if self._store is not None and self._has("failed"):
            raise NodeFailedError(self._get("failed"))

    def _until(self, ready: Callable[[], bool], *, for_what: Callable[[], str]) -> None:
        patience = min(PATIENCE, self._job.join_timeout)
        if self._ask(ready, seconds=patience):
            return
        self._say(f"waiting for {for_what()}")
        if not self._ask(ready, seconds=self._job.join_timeout - patience):
            raise LaunchError(f"waited {self._job.join_timeout} s in vain for {for_what()}")

    def _ask(self, ready: Callable[[], bool], *, seconds: float, heeding: bool = True) -> bool:
        deadline = time.monotonic() + seconds
        while not ready():
            if heeding:
                self._listen_for_failure()
            if time.monotonic() > deadline:
                return False
            time.sleep(ASK_EVERY)
        return True
