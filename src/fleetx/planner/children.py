"""Calls that must not disturb this process or stop the other ranks: in a child process, or on rank 0 for everyone."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from fleetx.comm.join import rejoin
from fleetx.comm.world import World
from fleetx.errors import UsageError
from fleetx.measure.child import Answer, forked
from fleetx.planner.workload import Workload


def on_rank_0(world: World, call: Callable[[], Any]) -> Any:
    """Call on rank 0 and return its JSON value on every rank. Its error is raised on every rank too."""
    answer: dict[str, Any] = {}
    error: Exception | None = None
    if world.rank == 0:
        try:
            answer = {"value": call()}
        except Exception as caught:
            answer, error = {"error": str(caught)}, caught
    answer = world.broadcast_json(answer)
    if error is not None:
        raise error
    if "error" in answer:
        raise UsageError(f"rank 0: {answer['error']}")
    return answer["value"]


def count_on_rank_0(world: World, count: Callable[[], Any]) -> Any:
    """Count bytes in a child of rank 0, because the user's code, run on tensors without data, may have side effects."""

    def in_child() -> Any:
        if world.device.type == "cuda":  # a process that uses CUDA cannot be forked
            return count()
        answer = forked(count, seconds=600)
        if answer.error:
            raise UsageError(f"the bytes of this model cannot be counted: {answer.error}")
        return answer.value

    return on_rank_0(world, in_child)


def on_all_ranks(
    call: Callable[[Workload, World], Any], workload: Workload, world: World, *, seconds: float
) -> list[Answer]:
    """Call in a child of every rank; the children form their own process group. Returns the answers of all ranks.

    On CUDA the call runs in this process, on a copy of the model: a process that uses CUDA cannot be forked.
    """
    with socket.create_server(("", 0), backlog=128) as server:
        host = world.process.master.rpartition(":")[0] or os.environ.get("MASTER_ADDR", "127.0.0.1")
        host, port = world.broadcast_json([host, server.getsockname()[1]])
        if world.device.type == "cuda":
            answer = _caught(lambda: call(workload.copied(), world))
        else:
            answer = forked(lambda: call(workload, rejoin(world, host, port, server.detach())), seconds=seconds)
    return [Answer(**told) for told in world.gather_json({"value": answer.value, "error": answer.error})]


def _caught(call: Callable[[], Any]) -> Answer:
    try:
        return Answer(value=call())
    except Exception as error:
        return Answer(error=f"{type(error).__name__}: {str(error)[:300]}")
