"""One server for a test run: the processes of the tests are its forks. No torch here, so that a fork starts quickly."""

from __future__ import annotations

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

import fleetx

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
    """Start the server, for the processes that this one starts, too."""
    if ADDRESS not in os.environ:
        forks()
        server: Any = forkserver._forkserver
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
