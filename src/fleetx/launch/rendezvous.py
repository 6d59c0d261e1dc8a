"""A fresh store for every attempt.

torchrun uses one store for all attempts, so that after a restart a rank may read the old address of a peer: with gloo,
21 of 28 restarts failed this way (torch 2.13). Here every attempt has its own TCPStore on its own port. The agent hosts
it, so it survives any worker. It listens on one address; torchrun's listens on all.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
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

    def wait(self, seconds: float) -> None:
        """Wait before the next attempt."""
        time.sleep(seconds)

    def add_failures(self, failures: Sequence[Failure]) -> None:
        """Keep failures of this node to report them to the other nodes."""

    def all_nodes_done(self) -> bool:
        """Report that the workers of this node have succeeded; returns whether those of all nodes have."""
        return True

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


class SingleNodeRendezvous(FleetrunRendezvous):
    """A single node need not wait for others: its first workers start before torch is imported."""

    def __init__(self, job: Job, *, attempt: Attempt, listener: socket.socket):
        self._job = job
        self.attempt = attempt
        self._listener: socket.socket | None = listener

    def next_rendezvous(self) -> RendezvousInfo:
        if self._listener is None:
            last = self.attempt
            self.attempt, self._listener = single_node_attempt(
                self._job,
                slots=last.slots,
                number=last.number + 1,
                restarts=last.restarts + 1,
                run_id=last.run_id,
            )
        store = host_store(self._listener, host=LOOPBACK)
        self._listener = None
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.attempt.master_port))
