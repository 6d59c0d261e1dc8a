"""A rank whose data has run out leaves while the others still wait for it: they are told who left, and when.

What they get from the network is "Connection closed by peer", which names nobody.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fleetx.comm.session import current
from fleetx.comm.world import World

_watching = False


def watch(world: World) -> None:
    """Leave a word when this process ends well, and read those of the others when it fails."""
    global _watching
    if _watching or world.size == 1:
        return
    _watching = True
    store = dist.distributed_c10d._get_default_store()
    failed: list[BaseException] = []

    def leave() -> None:
        if not failed:
            _try(lambda: store.set(f"fleetx/left/{world.rank}", str(_rounds())))

    def annotate(error: BaseException) -> None:
        failed.append(error)
        if isinstance(error, RuntimeError) and (note := _try(lambda: _said(store, world, _rounds()))):
            error.add_note(note)

    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if error not in failed:
            annotate(error)
        before(kind, error, traceback)

    hook.annotate = annotate  # type: ignore[attr-defined]  # for fleetrun, which reports an error before it is printed
    sys.excepthook = hook
    atexit.register(leave)  # after the process group was made, so before it is left


def _said(store: Any, world: World, here: int) -> str:
    gone = [rank for rank in range(world.size) if rank != world.rank and store.check([f"fleetx/left/{rank}"])]
    if not gone:
        return ""
    who = ", ".join(f"rank {rank} after {int(store.get(f'fleetx/left/{rank}'))}" for rank in gone)
    return (
        f"fleetx: the script of {who} updates had ended, while this rank {world.rank} went on after {here}. Were there "
        "fewer batches? `for batch in fleet.join(loader)` stops all ranks together"
    )


def _rounds() -> int:
    engine = current().last()
    return engine.round if engine is not None else 0


def _try(call: Callable[[], Any]) -> Any:
    """The store may be gone with the process that kept it; then there is nothing to tell."""
    try:
        return call()
    except Exception:
        return None
