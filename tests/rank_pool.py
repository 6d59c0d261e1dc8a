"""Ranks that live for the whole test run."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from fleetx.comm import session, world
from fleetx.verify.ranks import RankError
from fleetx.verify.ranks import Ranks as Pool
from forking import forks

__all__ = ["RankError", "Ranks", "forget", "freeze_imports", "imported_since_freeze"]


class Ranks(Pool):
    """Stopped while they have no job: the threads of a group wake a hundred times a second, and watchers wake, too.

    Not without xdist: if pytest is killed, they would stay, because they would keep their server alive.
    """

    def __init__(self, size: int):
        forks()
        super().__init__(size, before=_fresh)
        atexit.register(self._signal, signal.SIGCONT)  # or multiprocessing would wait for ever: SIGTERM stays pending

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        self._signal(signal.SIGCONT)
        try:
            return super().run(job, *args)
        finally:
            if "PYTEST_XDIST_WORKER" in os.environ:
                self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        super().stop()
        self._signal(signal.SIGCONT)  # what is left are watchers, which end with their ranks

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):  # it has had no job yet
                os.killpg(process.pid, number)


def forget() -> None:
    """Give every test a session that knows no world, no model, and no program of a Paddle script."""
    session.reset()


def _destroy_groups() -> None:
    """Destroy the groups that the last job left on all ranks: the threads of each wake a hundred times a second."""
    left = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    left = [group for group in left if not group.group_desc.startswith("mesh")]  # parts/sharding/fsdp.py keeps these
    if left:
        world.forget_groups()
        gc.collect()  # models that still use them
        freeze_imports()
    for group in left:
        dist.destroy_process_group(group)


def freeze_imports() -> None:
    """After a collection: exclude what was imported since the last time, so that the next collection is short.

    Only imports are worth it, because nothing that is frozen is ever collected, not even a model.
    """
    global _modules_frozen
    if imported_since_freeze():
        gc.freeze()
        _modules_frozen = len(sys.modules)


_modules_frozen = 0


def imported_since_freeze() -> int:
    """The number of modules that were imported since then."""
    return len(sys.modules) - _modules_frozen


def _fresh() -> None:
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # with its watcher. If the server ends, the kernel continues its stopped groups
    forget()
    _destroy_groups()
    torch.default_generator.manual_seed(0)  # torch.manual_seed also formats the stack, for a GPU that may come later
    warnings.simplefilter("error")
