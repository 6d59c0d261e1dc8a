"""The fork server: a process that has already imported torch and forks workers, which need not import it again.

    python -u fork_server.py PARENT SOCKET MODULES...

A forked worker behaves like one started with `python`, only faster:

- Preloaded modules stay hidden until the script imports one of them. If the script has by then changed a variable that
  torch reads during import, such as OMP_NUM_THREADS, the worker starts over without the fork server: the change would
  have no effect on a torch that is already loaded.
- The server has a single thread, has not touched a GPU, and holds no socket but its own, which the workers close.
- A worker is a child of the launcher like any other: its parent, an intermediate process, exits at once, and the
  launcher adopts orphans.

Like runner.py, this file is run by its path, and imports nothing from fleetx until it preloads its modules.
"""

import atexit
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the directory of this file, which must not shadow other modules

RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "runner.py")

# Imported by every training script, or by its first steps: torch's optimizers import torch._dynamo on their first step.
TRAINING = (
    "torch", "numpy.random", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.nn.parallel", "torch.testing", "fleetx.fleet", "fleetx.parts.*", "fleetx.engine.checkpoint",
    "encodings.idna",
)  # fmt: skip

# Variables that torch, numpy, their libraries and fleetx read while they are imported or loaded.
READ_BY_IMPORTS = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH", "PYTORCH_",
    "AOT", "INDUCTOR_", "CUDA_", "HIP_", "ROCR_", "HSA_", "CUBLAS_", "CUDNN_", "NPY_", "NUMPY_", "SYMPY_", "MPMATH_",
    "FLEETX_", "LD_", "MALLOC_", "PYTHON", "SAFETENSORS_",
)  # fmt: skip


def send(connection: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("!I", len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """The next message. Raises EOFError if the other end is gone."""
    (size,) = struct.unpack("!I", read_exactly(connection, 4))
    return json.loads(read_exactly(connection, size))


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes. Raises EOFError if the other end is gone."""
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise EOFError
        data += more
    return data


class Hidden:
    """Loaded modules that stay out of sys.modules until the script imports one of them. Both finder and loader."""

    def __init__(self, modules: dict[str, ModuleType], *, compare_all: bool):
        self._modules = modules
        self._compare_all = compare_all

    def hide(self, *, start_over: Any) -> None:
        self._environ = dict(os.environ)
        self._start_over = start_over
        for name in self._modules:
            sys.modules.pop(name, None)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        module = self._modules.get(name)
        original = getattr(module, "__spec__", None)
        # A module of this name next to the script takes precedence.
        if original is None or "." in name or PathFinder.find_spec(name, sys.path[:1]):
            return None
        spec = ModuleSpec(name, self, origin=original.origin)  # type: ignore[arg-type]
        spec.submodule_search_locations = original.submodule_search_locations
        spec.loader_state = original
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Reveal all of them: importing one would have imported most of the others."""
        if self._changed():
            self._start_over()
        sys.meta_path.remove(self)
        sys.modules.update({name: module for name, module in self._modules.items() if name not in sys.modules})
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = module.__spec__.loader_state  # type: ignore[union-attr]

    def _changed(self) -> bool:
        names = {*os.environ, *self._environ}
        changed = (name for name in names if os.environ.get(name) != self._environ.get(name))
        return any(self._compare_all or name.startswith(READ_BY_IMPORTS) for name in changed)


def import_ahead(names: list[str]) -> dict[str, ModuleType]:
    """Import `names` and return the modules that this added to sys.modules, except the standard library's."""
    before = set(sys.modules)
    for name in names:
        module = importlib.import_module(name.removesuffix(".*"))
        if name.endswith(".*"):
            for info in pkgutil.iter_modules(module.__path__, f"{module.__name__}."):
                importlib.import_module(info.name)
    new = set(sys.modules) - before
    return {name: sys.modules[name] for name in new if name.partition(".")[0] not in sys.stdlib_module_names}


def why_not() -> str | None:
    """Why this process must not fork workers; None if it may."""
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        return f"an import started a thread ({names}), which a fork would lose"
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
                return "an import has opened the GPU, whose driver does not survive a fork"
        except OSError:
            pass  # the descriptor of the listing itself
    return None


def serve(connection: socket.socket) -> tuple[dict, int]:
    """Answer requests until the launcher is gone. Returns only in a worker: (request, pid of its forking parent)."""
    while True:
        try:
            request = receive(connection)
        except (EOFError, OSError):
            os._exit(0)
        reading, writing = os.pipe()
        child = os.fork()
        if child:
            os.close(writing)
            pid = os.read(reading, 20)
            os.close(reading)
            os.waitpid(child, 0)  # from here on the worker is a child of the launcher
            send(connection, {"pid": int(pid)})
            continue
        between = os.getpid()
        if pid_of_worker := os.fork():
            os.write(writing, str(pid_of_worker).encode())
            os._exit(0)
        os.close(reading)
        os.close(writing)
        return request, between


def main(parent: int, descriptor: int, names: list[str]) -> None:
    spec = importlib.util.spec_from_file_location("fleetrun_runner", RUNNER)
    assert spec is not None
    assert spec.loader is not None
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    runner.die_with(parent)
    connection = socket.socket(fileno=descriptor)
    modules = import_ahead([*TRAINING, *names])
    send(connection, {"why_not": (reason := why_not())})
    if reason:
        return
    gc.collect()
    gc.freeze()  # so that a collection in a worker does not copy every page
    if "triton" in sys.modules:  # it comes with torch for CUDA, and reports all objects still frozen at exit
        atexit.register(gc.unfreeze)
    serve_workers(connection, modules, run=runner.main, compare_all=bool(names))


def serve_workers(
    connection: socket.socket, modules: dict[str, ModuleType], *, run: Callable[[list[str]], None], compare_all: bool
) -> None:
    """Fork workers until the launcher is gone. In each of them, hide `modules` and call `run`."""
    request, between = serve(connection)
    connection.close()
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environ"])
    modules["numpy.random"].seed()  # Python does the same for its own generator after a fork
    modules["torch"].default_generator.seed()
    while os.getppid() == between:
        time.sleep(0.0005)
    command = request["command"]  # the arguments of `python -u runner.py`

    def start_over() -> None:
        os.execve(sys.executable, [sys.executable, "-u", RUNNER, *command], os.environ)

    Hidden(modules, compare_all=compare_all).hide(start_over=start_over)
    run(command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
