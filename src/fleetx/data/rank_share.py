"""Whose share of the data is read here, and do all who share it have the same?"""

from __future__ import annotations

import gc
import logging
import time

import torch.distributed as dist

from fleetx.comm import session
from fleetx.comm.roles import from_environment
from fleetx.errors import UsageError

log = logging.getLogger(__name__)
PATIENCE, LONGEST = 10.0, 1800.0  # seconds: until it is said who is waited for, and until that is an error
_store: dist.Store | None = None  # the last one that was asked
_checks = 0  # that have come to an end in it; the same number on all ranks


def current() -> tuple[int, int]:
    """Which of how many replicas of the model this process feeds, as far as it is known by now.

    Workers that hold one replica together (the stages of a pipeline) take the same batches. Before a model is
    distributed every worker counts for itself, and before `fleet.init` the launcher's environment says who it is.
    """
    worker, shares = _worker(), session.current().shares()
    if shares - {worker}:
        gc.collect()  # old models that only a reference cycle keeps alive do not count
        shares = session.current().shares()
    if len(shares) > 1:
        raise UsageError(
            "several models are distributed over different numbers of replicas: make the loader with "
            "replica=(fleet.replica_index(model), fleet.replica_num(model))"
        )
    return shares.pop() if shares else worker


def _worker() -> tuple[int, int]:
    world = session.current().world
    if world is not None:
        return world.rank, world.size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    place = from_environment()
    return place.rank, place.size


def check_alike(data: str, order: str) -> bool:
    """Every worker must call it, with two fingerprints; all raise where they differ. False: before `fleet.init`."""
    global _store, _checks
    world = session.current().world
    if world is None or not dist.is_available() or not dist.is_initialized():
        return False
    rank, size = world.rank, world.size
    # By the store, and not by a collective: who goes on alone is told so, and does not hang without a word.
    store = dist.distributed_c10d._get_default_store()
    if store is not _store:
        _store, _checks = store, 0
    keys = [f"fleetx/data/{_checks}/{other}" for other in range(size)]
    store.set(keys[rank], f"{data} {order}")
    _wait(store, keys, rank)
    _checks += 1
    every = [text.decode().split() for text in store.multi_get(keys)]
    if differing := _sides([one[0] for one in every]):
        raise UsageError(
            f"the ranks have different data, {differing}, and would share it as if it were the same. Where each node "
            "has files of its own, make the loader with replica=(fleet.local_rank(), workers on this node), where each "
            "rank has, with shard=False; nodes with less data then end first: go through it by fleet.join(loader)"
        )
    if differing := _sides([one[1] for one in every]):
        raise UsageError(
            f"the ranks would deal the same data in different ways, {differing}: seed, shuffle, drop_last, batch_size "
            "and the state that was loaded must be the same on all of them"
        )
    return True


def _wait(store: dist.Store, keys: list[str], rank: int) -> None:
    begun, said = time.monotonic(), False
    while not store.check(keys):
        waited = time.monotonic() - begun
        if waited > (LONGEST if said else PATIENCE):
            absent = [other for other, key in enumerate(keys) if not store.check([key])]
            why = (
                f"rank {rank} goes through a loader whose batches are dealt to all ranks, and waits for rank "
                f"{', '.join(map(str, absent))} to do so too: pass shard=False to a loader that one rank reads alone"
            )
            if said:
                store.delete_key(keys[rank])
                raise UsageError(why)
            log.warning("%s", why)
            said = True
        time.sleep(0.01)


def _sides(numbers: list[str]) -> str:
    """Who differs from whom; nothing where all are alike."""
    sides = [[rank for rank, other in enumerate(numbers) if other == number] for number in dict.fromkeys(numbers)]
    named = [", ".join(map(str, side[:8])) + (" ..." if len(side) > 8 else "") for side in sides[:4]]
    return f"rank {' against '.join(named)}{' ...' if len(sides) > 4 else ''}" if len(sides) > 1 else ""
