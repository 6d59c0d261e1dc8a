"""Ranks that live for the whole test run: starting one takes seconds (torch is imported again), a job milliseconds."""

from __future__ import annotations

import io
import os
import socket
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fleetx.comm import session

START_SECONDS, JOB_SECONDS = 240, 240  # generous: a busy machine is not a failure


class RankError(AssertionError):
    """A job raised in a rank."""


class Ranks:
    """n processes in one gloo group. `run(job, *args)` calls job(*args) in each and returns the results by rank."""

    def __init__(self, size: int):
        self.size = size
        self._start()

    def _start(self) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        context = get_context("spawn")
        pipes = [context.Pipe() for _ in range(self.size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, self.size, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        self._collect(START_SECONDS)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((job, args))
        return self._collect(JOB_SECONDS)

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
                    self._renew()  # the others may wait for it in a collective
                    raise RankError(f"in rank {rank}:\n{payload}")
                results[rank] = torch.load(io.BytesIO(payload), weights_only=False)
        return [results[r] for r in range(self.size)]

    def _renew(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    import torch.distributed as dist

    os.environ["FLEETX_DEVICE"] = "cpu"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    dist.barrier()
    pipe.send((False, _pack(None)))
    warnings.simplefilter("error")
    while True:
        job, args = pipe.recv()
        forget()
        torch.manual_seed(0)
        try:
            pipe.send((False, _pack(job(*args))))
        except BaseException:
            pipe.send((True, traceback.format_exc()))


def forget() -> None:
    """Give every test a session that knows no world and no model."""
    session.reset()


def _pack(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()
