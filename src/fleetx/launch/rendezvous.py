"""A fresh store for every attempt.

torchrun uses one store for all attempts, so after a restart a rank may read the old address of a peer: with gloo, 21 of
28 restarts failed this way (torch 2.13). Here every attempt has its own TCPStore on its own port. The agent hosts it,
so it outlives any worker. It listens on one address; torchrun's listens on all.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from fleetx.launch.job import Attempt, Job
from fleetx.launch.report import Failure
from fleetx.launch.sockets import LOOPBACK, port_of, single_node_attempt

STORE_TIMEOUT = timedelta(seconds=60)


def host_store(listener: socket.socket, *, host: str) -> TCPStore:
    """Host a store on `listener`. Clients that connected earlier have been waiting in its queue."""
    port = port_of(listener)
    descriptor = listener.detach()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT, master_listen_fd=descriptor
    )


class FleetrunRendezvous(RendezvousHandler):
    """torchelastic's rendezvous interface, plus what fleetrun's agent needs."""

    attempt: Attempt  # the current one
    resizing = False  # the workers are stopped because others come or go: they get time to save their state

    def wait(self, seconds: float) -> None:
        """Wait before the next attempt."""
        time.sleep(seconds)

    def add_failures(self, failures: Sequence[Failure]) -> None:
        """Keep failures of this node to report them to the other nodes."""

    def members_change(self, *, wait: bool) -> bool:
        """Whether the workers ended because nodes come or go, which is not a failure of their own."""
        return False

    def tick(self) -> None:
        """Called while the workers are being stopped."""

    def all_nodes_done(self) -> bool:
        """Report that the workers of this node have succeeded; returns whether those of all nodes have."""
        return True

    def leave(self, *, failed: bool) -> list[Failure]:
        """Leave the job. After a failure, returns the failures of the other nodes."""
        return []

    def get_backend(self) -> str:
        return "fleetrun"

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.attempt.run_id if hasattr(self, "attempt") else ""

    def shutdown(self) -> bool:
        return True


@dataclass(eq=False)
class SingleNodeRendezvous(FleetrunRendezvous):
    """A single node need not wait for others: its first workers start before torch is imported.

    With --elastic, workers that failed on their own are left out of the next attempt if enough others remain, and come
    back after --regrow_after seconds.
    """

    job: Job
    _: KW_ONLY
    attempt: Attempt
    listener: socket.socket | None  # of the next store; None if it has yet to be opened
    print_status: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _failed: set[int] | None = field(default=None, init=False)  # slots at fault, if the attempt failed
    _grow_at: float = field(default=0.0, init=False)

    def next_rendezvous(self) -> RendezvousInfo:
        if self.listener is None:
            last = self.attempt
            self.attempt, self.listener = single_node_attempt(
                self._next_slots(),
                number=last.number + 1,
                restarts=last.restarts + (self._failed is not None),
                run_id=last.run_id,
            )
            self._failed = None
        store = host_store(self.listener, host=LOOPBACK)
        self.listener = None
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.attempt.master_port))

    def add_failures(self, failures: Sequence[Failure]) -> None:
        slots = self.attempt.slots
        self._failed = {slots[failure.rank] for failure in failures if not failure.secondary}

    def num_nodes_waiting(self) -> int:
        """1 when it is time for workers that were left out to come back, else 0."""
        self.resizing = len(self.attempt.slots) < self.job.workers and self.clock() >= self._grow_at
        if self.resizing:
            self.print_status(f"back to {self.job.workers} workers")
        return int(self.resizing)

    def _next_slots(self) -> tuple[int, ...]:
        everyone = tuple(range(self.job.workers))
        if self.job.elastic is None or self._failed is None:
            return everyone
        remaining = tuple(slot for slot in self.attempt.slots if slot not in self._failed)
        if not self.job.elastic <= len(remaining) < len(everyone):
            return everyone
        self._grow_at = self.clock() + self.job.regrow_after
        self.print_status(f"continuing with {len(remaining)} of {len(everyone)} workers")
        return remaining
