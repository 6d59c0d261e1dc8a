"""`fleet.record`, `fleet.log` and `fleet.progress`. fleetx.record is imported only when called."""

from __future__ import annotations

import atexit
import math
import numbers
import os
import platform
import secrets
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from fleetx import __version__
from fleetx.base import seams
from fleetx.comm import peers
from fleetx.comm.session import Session, current
from fleetx.engine.dtensors import local
from fleetx.errors import UsageError
from fleetx.fleet import prediction
from fleetx.strategy.explain import Explanation, in_order

if TYPE_CHECKING:
    from fleetx.engine.engine import Engine
    from fleetx.record.recorder import Recorder

# Environment variables that change how a training runs. Never record all of them: some may hold passwords.
_VARIABLES = (
    "FLEETX_DEVICE", "FLEETX_WATCH", "FLEETX_DEBUG", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "PYTORCH_CUDA_ALLOC_CONF", "MALLOC_CONF", "LD_PRELOAD",
    "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip


@peers.naming()
def record(
    folder: str | Path,
    *,
    every_rank: bool = False,
    predict_memory: bool | None = None,
    trackers: str | Sequence[str] = (),
) -> Recorder:
    """Write what happens in this run to `folder`, as JSON lines. Every worker must call it, after `fleet.init`.

    Rank 0 writes, including what the other ranks measured. `fleetx report FOLDER` turns the record into a page. A
    resumed run appends. Recording ends with the script, or when every worker calls `close()` on the returned recorder.

    every_rank: have the other ranks write their rounds as well, each to its own file.
    predict_memory: predict the peak memory of a step, to compare it with the measured one. To do so, run the first
        batch once more, on tensors without data. None: only on a CPU, in a child process, for at most 30 seconds; True:
        for up to an hour, and on CUDA too, where it calls a copy of the model in this process; False: never.
    trackers: "tensorboard", "wandb" or "mlflow", or several: rank 0 passes the same facts on to them.
    """
    from fleetx.record import trackers as known
    from fleetx.record.recorder import Recorder
    from fleetx.record.schema import SCHEMA
    from fleetx.record.stream import Stream
    from fleetx.record.usage import Usage

    session, folder = current(), Path(folder)
    world = session.here()
    names = [trackers] if isinstance(trackers, str) else list(trackers)
    known.check(names)
    if session.recorder is not None and session.recorder.stream is not None:
        raise UsageError(f"this run is recorded in {session.recorder.stream.folder} already: call fleet.record once")
    token = world.broadcast_json(secrets.token_hex(4))
    store = dist.PrefixStore(f"fleetx/record/{token}", seams.default_store().clone()) if world.size > 1 else None
    first = world.rank == 0
    stream = Stream(
        folder, world.rank, world.size, store, Usage(world.device), every_rank=every_rank,
        sinks=known.made(names, folder) if first else [],
    )  # fmt: skip
    atexit.unregister(session.stop_recording)
    atexit.register(session.stop_recording)  # a script may fail before it has distributed anything
    session.stop_recording()  # ends the recorder of fleet.progress, which keeps nothing
    recorder = session.recorder = Recorder(world, stream, predicts=predict_memory)
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0)
    recorder.say("start", schema=SCHEMA, ranks=world.size, device=world.device.type, restart=restart, **_environment())
    if restart and first:
        recorder.note("restart", f"attempt {restart + 1}")
    for engine in list(session.entries):
        attach(session, engine)
    return recorder


def attach(session: Session, engine: Engine) -> None:
    """Record this training, if anything is recorded."""
    recorder = session.recorder
    if recorder is None:
        return
    recorder.attach(engine, partial(_plan, session))
    if recorder.stream is not None:
        prediction.arrange(recorder, engine)


def _environment() -> dict[str, Any]:
    versions = {"fleetx": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "host": socket.gethostname(), "versions": versions, "command": _launcher() or [sys.executable, *sys.argv],
        "folder": os.getcwd(), "threads": torch.get_num_threads(), "machine": platform.platform(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }  # fmt: skip


def _launcher() -> list[str]:
    """The command of fleetrun or torchrun, the parent of this worker."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return []
    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []


def explained(session: Session, engine: Engine) -> Explanation:
    entry = session.entries[engine]
    text = entry.batch_plan.text if entry.batch_plan else ""
    return Explanation(entry.strategy, engine.plan, engine.world, engine, text)


def _plan(session: Session, engine: Engine) -> dict[str, Any]:
    entry = session.entries[engine]
    params = list(engine.names)
    here = [p for p in params if not p.is_meta]  # a pipeline leaves other stages' parameters on meta
    held, whole = sum(local(p).nbytes for p in here), sum(p.nbytes for p in params)
    kept = sum(part.keeps(params, engine.plan) for part in engine.plan.parts) * held // max(whole, 1)  # on this rank
    found = [part.predicted(engine.context_of(part)) for part in engine.plan.parts]
    predicted = max((p for p in found if p is not None), default=None)
    line = {
        "name": type(engine.model).__name__, "replicas": engine.layout.replica_group.size, "window": engine.window(),
        "strategy": entry.strategy.declared(), "explain": str(explained(session, engine)),
        "acts": [[stage.name, *told] for stage, *told in in_order(engine.plan, engine.layout.replica_group.size)],
        "parameters": sum(p.numel() for p in params),
        "bytes": {
            "parameters": held, "kept": kept,
            "gradients": sum(local(p).nbytes for p in here if p.requires_grad),
        },
        "divided": engine.layout.shard_group is not None or engine.layout.reduced or not engine.taps,
    }  # fmt: skip
    return line if predicted is None else line | {"predicted": predicted}


def log(**values: float) -> None:
    """Add numbers of your own to the record, such as `fleet.log(accuracy=0.93)`. No-op if nothing is recorded."""
    for name, value in values.items():
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if not isinstance(number, numbers.Real) or isinstance(number, bool):
            raise TypeError(f"fleet.log({name}=...): must be a number, not {type(value).__name__}")
        values[name] = float(number)
    if (recorder := current().recorder) is not None:
        recorder.log(values)


def progress(loader: Iterable[Any], *, total: int | None = None, every: float = 10.0) -> Iterator[Any]:
    """`for batch in fleet.progress(loader)`: a live table on rank 0, or a line now and then without a terminal.

    total: the number of batches, if the loader has no length.
    every: seconds between two lines, without a terminal.
    """
    from fleetx.record.progress import shown
    from fleetx.record.recorder import Recorder

    session = current()
    world = session.here()
    if total is not None and (not isinstance(total, int) or total < 0):
        raise UsageError(f"total = {total!r}: must be a number of batches")
    if not (isinstance(every, int | float) and every > 0 and math.isfinite(every)):
        raise UsageError(f"every = {every!r}: must be a number of seconds")
    if session.recorder is None:
        session.recorder = Recorder(world)
        for engine in list(session.entries):
            attach(session, engine)
    return shown(loader, total, every, session)
