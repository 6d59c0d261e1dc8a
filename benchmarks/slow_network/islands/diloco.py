"""torchft's DiLoCo. Each island is one of its replica groups; gradients are averaged within it by DDP.

Every rank exchanges with the rank of the same number in the other island, so a host sends a copy per rank.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from benchmarks.slow_network.methods import Loop, Prepare


def missing() -> str:
    absent = [name for name in ("torchft", "opentelemetry") if importlib.util.find_spec(name) is None]
    return f"{absent[0]} is not installed" if absent else ""


def make(period: int, island: Callable[[], dist.ProcessGroup]) -> Callable[[Mapping[str, float], str], Prepare]:
    def of(settings: Mapping[str, float], task: str) -> Prepare:
        def prepare(model: nn.Module, optimizer: Any) -> Loop:
            return started(model, optimizer, settings, period, island())

        return prepare

    return of


def started(
    model: nn.Module, optimizer: Any, settings: Mapping[str, float], period: int, island: dist.ProcessGroup
) -> Loop:
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    servers = Servers(island)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=dist.get_world_size() // island.size(),
        use_async_quorum=False,
        init_sync=False,  # all start equal
        rank=island.rank(),
        world_size=island.size(),
        store_addr=servers.here,
        store_port=servers.store.port,
        lighthouse_addr=servers.lighthouse,
        replica_id=f"island{dist.get_rank() // island.size()}",
        hostname=servers.here,
    )
    momentum = settings["outer_momentum"]
    outer = SGD(model.parameters(), lr=settings["outer_lr"], momentum=momentum, nesterov=momentum > 0)
    wrapped = DistributedDataParallel(model, process_group=island, gradient_as_bucket_view=True)
    diloco = DiLoCo(manager, [model], optimizer, outer, sync_every=period, pin_memory=False)
    diloco.__enter__()

    def end() -> None:
        dist.barrier()  # a manager that is asked by another one must still be there
        diloco.__exit__(None, None, None)
        manager.shutdown(wait=False)
        dist.barrier()
        servers.close()

    return Loop(wrapped, optimizer, Tensor.backward, end)


class Servers:
    """What torchft needs beside its managers: a lighthouse for all, and a store per island."""

    def __init__(self, island: dist.ProcessGroup):
        from torchft.coordination import LighthouseServer

        self.here = os.environ["NETLAB_IPS"].split(",")[int(os.environ["NETLAB_HOST"])]
        self._server: Any = None
        mine = {"lighthouse": "", "port": 0}
        if dist.get_rank() == 0:
            bind = f"{self.here}:{_free(self.here)}"
            self._server = LighthouseServer(bind=bind, min_replicas=dist.get_world_size() // island.size())
            mine["lighthouse"] = f"http://{bind}"
        if island.rank() == 0:
            mine["port"] = _free(self.here)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        self.lighthouse = found[0]["lighthouse"]
        port = found[dist.get_rank() - island.rank()]["port"]
        self.store = dist.TCPStore(self.here, port, is_master=island.rank() == 0, wait_for_workers=False)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()


def _free(address: str) -> int:
    with socket.socket() as found:
        found.bind((address, 0))
        return found.getsockname()[1]
