"""Which worker this is, and how many there are."""

from __future__ import annotations

import torch
from torch import nn

from fleetx.comm.session import current


def worker_index() -> int:
    """The rank of this worker."""
    return current().here().rank


def worker_num() -> int:
    """The number of workers."""
    return current().here().size


def is_first_worker() -> bool:
    """Whether this is rank 0, which should print and write."""
    return current().here().rank == 0


def is_worker() -> bool:
    """True: in collective training every process is a worker."""
    return current().here() is not None


def local_rank() -> int:
    """The rank of this worker on its machine."""
    return current().here().process.local_rank


def replica_index(model: nn.Module | None = None) -> int:
    """Which replica of the model this worker belongs to: pass it as `rank` to a DistributedSampler."""
    return current().find(model).layout.replica_group.rank


def replica_num(model: nn.Module | None = None) -> int:
    """The number of replicas. Workers of one replica (the stages of a pipeline) take the same batches."""
    return current().find(model).layout.replica_group.size


def worker_endpoints(to_string: bool = False) -> list[str] | str:
    """The addresses of all workers, as a list or joined by commas."""
    endpoints = list(current().here().process.endpoints)
    return ",".join(endpoints) if to_string else endpoints


def barrier_worker() -> None:
    """Wait for all workers."""
    current().here().barrier()


def device() -> torch.device:
    """The device of this worker. Move the model and the batches there."""
    return current().here().device
