"""Which share of the data this rank reads, and a check that all ranks share the same data."""

from __future__ import annotations

import gc
import logging
import time

import torch.distributed as dist

from fleetx.base import seams
from fleetx.comm import session
from fleetx.comm.roles import from_environment
from fleetx.errors import UsageError

log = logging.getLogger(__name__)
WARN_AFTER, TIMEOUT = 10.0, 1800.0  # seconds to wait for other ranks
_store: dist.Store | None = None  # of the last check
_checks = 0  # completed with this store; equal on all ranks


def current() -> tuple[int, int]:
    """(index, number) of the model replica that this process feeds.

    Ranks that hold one replica together, such as the stages of a pipeline, read the same batches. Until a model is
    distributed, every rank counts as a replica; until `fleet.init`, the launcher's environment provides the rank.
    """
    rank, shares = _rank_and_size(), session.current().shares()
    if shares - {rank}:
        gc.collect()  # ignore old models that only a reference cycle keeps alive
        shares = session.current().shares()
    if len(shares) > 1:
        raise UsageError(
            "several models are distributed over different numbers of replicas: create the loader with "
            "replica=(fleet.replica_index(model), fleet.replica_num(model))"
        )
    return shares.pop() if shares else rank


def _rank_and_size() -> tuple[int, int]:
    world = session.current().world
    if world is not None:
        return world.rank, world.size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    process = from_environment()
    return process.rank, process.size


def check_same_data(data: str, order: str) -> bool:
    """Compare fingerprints of data and order; every rank must call this. If they differ, raise an error on all ranks.

    Returns False before `fleet.init`, when nothing can be compared.
    """
    global _store, _checks
    world = session.current().world
    if world is None or not dist.is_available() or not dist.is_initialized():
        return False
    # Use the store, not a collective: a rank that calls this alone gets an error instead of hanging.
    store = seams.default_store()
    if store is not _store:
        _store, _checks = store, 0
    keys = [f"fleetx/data/{_checks}/{rank}" for rank in range(world.size)]
    store.set(keys[world.rank], f"{data} {order}")
    _wait(store, keys, world.rank)
    _checks += 1
    values = [text.decode().split() for text in store.multi_get(keys)]
    if groups := _disagreement([value[0] for value in values]):
        raise UsageError(
            f"the ranks have different data ({groups}), but each would read a share of it as if it were the same. If "
            "every node has its own files, create the loader with replica=(fleet.local_rank(), workers on this node); "
            "if every rank has, with shard=False. Ranks with less data finish first: iterate with fleet.join(loader)"
        )
    if groups := _disagreement([value[1] for value in values]):
        raise UsageError(
            f"the ranks would split the same data differently ({groups}): seed, shuffle, drop_last, batch_size and the "
            "loaded state must be the same on all ranks"
        )
    return True


def _wait(store: dist.Store, keys: list[str], rank: int) -> None:
    start, warned = time.monotonic(), False
    while not store.check(keys):
        if time.monotonic() - start > (TIMEOUT if warned else WARN_AFTER):
            missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
            message = (
                f"rank {rank} iterates over a loader that all ranks share and waits for rank {', '.join(missing)} to "
                "do the same: pass shard=False to a loader that only one rank uses"
            )
            if warned:
                store.delete_key(keys[rank])
                raise UsageError(message)
            log.warning("%s", message)
            warned = True
        time.sleep(0.01)


def _disagreement(values: list[str]) -> str:
    """Which ranks differ, as text; "" if all agree."""
    groups = [[rank for rank, other in enumerate(values) if other == value] for value in dict.fromkeys(values)]
    shown = [", ".join(map(str, group[:8])) + (" ..." if len(group) > 8 else "") for group in groups[:4]]
    return f"rank {' against '.join(shown)}{' ...' if len(groups) > 4 else ''}" if len(groups) > 1 else ""
