"""Ranks that live for the whole test run."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

import fleetx
from fleetx.comm import session, world
from fleetx.verify.ranks import RankError
from fleetx.verify.ranks import Ranks as Pool

__all__ = ["RankError", "Ranks", "forget", "forks", "freeze_imports", "imported_since_freeze"]


class Ranks(Pool):
    """Stopped while they have no job, because the threads of a group wake a hundred times a second, and so do watchers."""

    def __init__(self, size: int):
        forks()
        super().__init__(size, before=_fresh)
        atexit.register(self._signal, signal.SIGCONT)  # or multiprocessing would wait for them

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        self._signal(signal.SIGCONT)
        try:
            return super().run(job, *args)
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):  # it has had no job yet
                os.killpg(process.pid, number)


# What the processes of the tests import sooner or later. Lightning and its kind are left to the few that need them.
PRELOADED = [
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.testing",
    "torch.distributed.pipelining", "transformers.modeling_utils", "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.resnet.modeling_resnet", "pytest", "hypothesis",
]  # fmt: skip
OTHERS = ("__main__", "fork_server", "runner", "triton_kernels")  # run by their path, or not without triton
ADDRESS = "FLEETX_TESTS_FORK_SERVER"


def forks() -> str:
    """The start method whose processes are forks of a server that has done nothing but imports.

    A process that trains imports for four seconds, half of it at its first step (`torch._dynamo`). The server imports
    that once for all pytest workers: the process that starts them starts it.
    """
    if ADDRESS in os.environ:
        shared = _shared(*os.environ[ADDRESS].split())
        forkserver.ensure_running = shared.ensure_running
        forkserver.connect_to_new_process = shared.connect_to_new_process
        return "forkserver"
    multiprocessing.set_forkserver_preload([*PRELOADED, *_modules(), "frozen_imports"])
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    room = "x" * 16384  # in which a fork can show its own environment (forked_command.show_environment)
    with mock.patch.dict(os.environ, PYTHONPATH=path, FLEETX_TESTS_ROOM=room):
        forkserver.ensure_running()
    return "forkserver"


def _modules() -> list[str]:
    """Those of fleetx that need no other library."""
    root = Path(fleetx.__file__).parent
    paths = [path.relative_to(root.parent).with_suffix("") for path in root.rglob("*.py")]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.startswith("fleetx.integrations") and not name.endswith(OTHERS)]


def share_forks() -> None:
    """Start the server, for the pytest workers that this process starts."""
    forks()
    server = forkserver._forkserver
    key = getattr(server, "_forkserver_authkey", None) or b""  # since Python 3.14
    os.environ[ADDRESS] = f"{server._forkserver_address} {key.hex()}"


class _Shared(forkserver.ForkServer):
    """A server that another process has started."""

    def __init__(self, address: str, key: str = ""):
        super().__init__()
        self._forkserver_address, self._forkserver_authkey = address, bytes.fromhex(key)
        self._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # it is not this process that keeps it alive

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()


_shared = cache(_Shared)


def forget() -> None:
    """Give every test a session that knows no world and no model, and no program of a Paddle script."""
    session.reset()
    programs: Any = sys.modules.get("fleetx.paddle.static.programs")
    if programs is not None:
        programs._last_minimized, programs._in_use = None, WeakValueDictionary()
        programs.Application.last = None


def _destroy_groups() -> None:
    """Destroy the groups that the last job left on all ranks: the threads of each wake a hundred times a second."""
    left = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    left = [group for group in left if not group.group_desc.startswith("mesh")]  # parts/sharding/fsdp.py keeps these
    if left:
        world._owned.clear()
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
    """How many modules."""
    return len(sys.modules) - _modules_frozen


def _fresh() -> None:
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # with its watcher. If pytest is killed, the kernel continues stopped groups, and they end
    forget()
    _destroy_groups()
    torch.default_generator.manual_seed(0)  # torch.manual_seed also formats the stack, for a GPU that may come later
    warnings.simplefilter("error")
