"""The variables of a worker: torch's names, Paddle's names, and ours."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetx.errors import LaunchError
from fleetx.launch import nodes
from fleetx.launch.job import Job, World

FIRST_PORT = 6070  # of the endpoints across nodes, as in Paddle; $FLAGS_START_PORT replaces it


def of_worker(job: Job, *, world: World, local_rank: int, error_file: Path, given: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of one worker; `given` is fleetrun's own."""
    rank = job.rank * job.workers + local_rank
    size = job.nodes * job.workers
    return {
        **{name: value for name, value in given.items() if name != "FLAGS_selected_gpus"},  # only true on a GPU
        # what torchelastic's LocalElasticAgent sets (torch 2.13), name by name; a test compares with torchrun
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(job.rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "worker",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(job.workers),
        "GROUP_WORLD_SIZE": str(job.nodes),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(world.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": world.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the agent's: rank 0 must not start a second one
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": given.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        # Paddle's
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(size),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(world.endpoints),
        "PADDLE_CURRENT_ENDPOINT": world.endpoints[rank],
        "PADDLE_RANK_IN_NODE": str(local_rank),
        # ours
        "FLEETX_DEVICE": job.device,
        **({"FLEETX_PADDLE_API": job.paddle_api} if job.paddle_api else {}),
        **({"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}),
        **_gpus(job, local_rank=local_rank),
        **_interface(job, world=world, rank=rank, given=given),
        **(_terminal(given) if local_rank == 0 else {}),
    }


def _gpus(job: Job, *, local_rank: int) -> dict[str, str]:
    """Every worker sees the chosen GPUs and no others, so that LOCAL_RANK is the index of its own."""
    if not job.gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(job.gpus), "FLAGS_selected_gpus": str(local_rank)}


def _interface(job: Job, *, world: World, rank: int, given: Mapping[str, str]) -> dict[str, str]:
    """Tell gloo where this node's address is. By itself it asks for the host's name, which often means 127.0.1.1."""
    if "GLOO_SOCKET_IFNAME" in given:
        return {}
    name = nodes.interface_of(world.endpoints[rank].rpartition(":")[0])
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def _terminal(given: Mapping[str, str]) -> dict[str, str]:
    """Worker 0 writes to a file that is echoed: if the echo ends in a terminal, progress bars may believe in one."""
    if not sys.stdout.isatty():
        return {}
    size = shutil.get_terminal_size()
    names = {"COLUMNS": str(size.columns), "LINES": str(size.lines)}
    if "NO_COLOR" not in given:
        names |= {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    return {name: value for name, value in names.items() if name not in given}


def threads_of_a_worker(workers: int) -> int:
    """The cores that this process may use, shared out; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period)) if quota != "max" else cores
    except (OSError, ValueError):
        pass  # no cgroup, or one of another kind
    return max(1, cores // workers)


def first_port() -> int | None:
    """$FLAGS_START_PORT, if it is set."""
    value = os.environ.get("FLAGS_START_PORT")
    if not value:
        return None
    if not value.isdigit() or not 1024 < int(value) < 65536:
        raise LaunchError(f"FLAGS_START_PORT={value} is not a port above 1024")
    return int(value)


def endpoints_of(addresses: Sequence[str], *, workers: int) -> tuple[str, ...]:
    """host:port of every rank; `addresses` has one entry a node. Nodes that share an address share out its ports."""
    base = first_port() or FIRST_PORT
    taken: dict[str, int] = {}
    endpoints = []
    for address in addresses:
        for _ in range(workers):
            endpoints.append(f"{address}:{base + taken.setdefault(address, 0)}")
            taken[address] += 1
    return tuple(endpoints)
