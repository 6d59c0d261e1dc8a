"""A fresh store for every attempt.

torchrun keeps one store for all attempts. After a restart a rank may then read its peer's old address in it: 21 of 28
restarts with gloo failed so (torch 2.13). Here each attempt has its own TCPStore on its own port. The agent holds it,
so it survives any worker, and it listens on one address, where torchrun's listens on all.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from fleetx.launch.job import Job, World
from fleetx.launch.report import Failure
from fleetx.launch.sockets import LOOPBACK, port_of, world_of_one_node

STORE_TIMEOUT = timedelta(seconds=60)


def serve(listener: socket.socket, *, host: str) -> TCPStore:
    """A store that answers on `listener`, which was bound by us. Who connected before this waits in its queue."""
    port = port_of(listener)
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


class Rendezvous(RendezvousHandler):
    """What torchelastic asks a rendezvous for, and the few words more that fleetrun's agent needs."""

    world: World  # of the current attempt

    def next_rendezvous(self) -> RendezvousInfo:
        raise NotImplementedError

    def share(self, failures: Sequence[Failure]) -> None:
        """Tell the other nodes what failed here."""

    def all_done(self) -> bool:
        """The workers here have succeeded; have those of all nodes?"""
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
        return self.world.run_id if hasattr(self, "world") else ""

    def shutdown(self) -> bool:
        return True


class OneNode(Rendezvous):
    """One node needs nobody's leave: the first world is made, and its workers run, before torch is imported."""

    def __init__(self, job: Job, *, world: World, listener: socket.socket):
        self._job = job
        self.world = world
        self._listener: socket.socket | None = listener

    def next_rendezvous(self) -> RendezvousInfo:
        if self._listener is None:
            self.world, self._listener = world_of_one_node(
                self._job, attempt=self.world.attempt + 1, run_id=self.world.run_id
            )
        store = serve(self._listener, host=LOOPBACK)
        self._listener = None
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.world.master_port))
