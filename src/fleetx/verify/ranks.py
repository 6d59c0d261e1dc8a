"""A pool of ranks, because starting one takes a second or more, and a job milliseconds."""

from __future__ import annotations

import gc
import io
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fleetx.base import seams

# Imported once, in a server from which the ranks are forked. None of it touches a GPU.
PRELOADED = [seams.DYNAMO, "torch.distributed.fsdp", "fleetx.verify.runs"]
START_SECONDS, JOB_SECONDS = 240, 240  # generous: a busy machine is not a failure


class RankError(AssertionError):
    """A job raised in a rank."""


class Ranks:
    """n processes in one process group. `run(job, *args)` calls job(*args) in each and returns the results by rank.

    before: a module-level function that each process calls before every job.
    """

    def __init__(
        self,
        size: int,
        *,
        device: str = "cpu",
        before: Callable[[], Any] | None = None,
        job_seconds: float = JOB_SECONDS,
    ):
        self.size, self._device, self._before, self._job_seconds = size, device, before, job_seconds
        self._context: Any = get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._start()

    def _start(self) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        pipes = [self._context.Pipe() for _ in range(self.size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            self._context.Process(
                target=_serve,
                args=(rank, self.size, port, self._device, theirs, self._before, dict(os.environ)),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        self._collect(START_SECONDS)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        if not all(process.is_alive() for process in self._processes):
            self._renew()
        # Sent as bytes, because a pipe would share each tensor through its own connection.
        message = _pack((job, args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        return self._collect(self._job_seconds)

    def _collect(self, seconds: float) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = dict(zip(self._pipes, range(self.size), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=seconds)
            if not ready:
                self._renew()
                raise RankError(f"ranks {sorted(waiting.values())} did not answer within {seconds} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    failed, payload = pipe.recv()
                except EOFError:
                    self._renew()
                    raise RankError(f"rank {rank} died") from None
                if failed:
                    self._renew()  # the others may be waiting for it in a collective
                    raise RankError(f"in rank {rank}:\n{payload}")
                results[rank] = _unpack(payload)
        return [results[r] for r in range(self.size)]

    def _renew(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        for process in reversed(self._processes):  # rank 0 last: it hosts the store, which the others need
            process.kill()
            process.join()


def _serve(
    rank: int,
    size: int,
    port: int,
    device: str,
    pipe: Connection,
    before: Callable[[], Any] | None,
    environ: dict[str, str],
) -> None:
    import torch.distributed as dist

    os.environ.clear()  # the server's is that of its start; what torch reads while it is imported stays so
    os.environ.update(environ)
    os.environ["FLEETX_DEVICE"] = device
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    dist.barrier()
    pipe.send((False, _pack(None)))
    gc.collect()
    gc.freeze()  # excludes what torch imported, so that collections stay short
    while True:
        message = pipe.recv_bytes()
        try:
            if before is not None:
                before()
            job, args = _unpack(message)
            pipe.send((False, _pack(job(*args))))
        except BaseException:
            pipe.send((True, traceback.format_exc()))


def _pack(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _unpack(message: bytes) -> Any:
    return torch.load(io.BytesIO(message), weights_only=False)
