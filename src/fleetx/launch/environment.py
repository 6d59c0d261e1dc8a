"""The environment variables of a worker: torch's, Paddle's and our own."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetx.errors import LaunchError
from fleetx.launch import nodes, secret
from fleetx.launch.job import Attempt, Job

# FLAGS_selected_gpus is set below, on GPUs only.
_NOT_FOR_WORKERS = (secret.VARIABLE, "FLAGS_selected_gpus")
FIRST_PORT = 6070  # of the endpoints on several nodes, as in Paddle; $FLAGS_START_PORT overrides it


def common_environment(job: Job, *, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that all workers of this node share. environ: fleetrun's own."""
    return {
        **{name: value for name, value in environ.items() if name not in _NOT_FOR_WORKERS},
        "FLEETX_DEVICE": job.device,
        **({"FLEETX_PADDLE_API": job.paddle_api} if job.paddle_api else {}),
        **({"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}),
    }


def worker_environment(
    job: Job, *, attempt: Attempt, local_rank: int, error_file: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """The complete environment of one worker."""
    workers = len(attempt.slots)
    rank = attempt.first_rank + local_rank
    size = attempt.nodes * workers
    gpus = [job.gpus[slot] for slot in attempt.slots] if job.gpus else []
    return {
        **common_environment(job, environ=environ),
        # Everything that torchelastic's LocalElasticAgent sets (torch 2.13); a test compares with torchrun.
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(attempt.node),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "worker",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(workers),
        "GROUP_WORLD_SIZE": str(attempt.nodes),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": attempt.master_addr,
        "MASTER_PORT": str(attempt.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt.number),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": attempt.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 must use the agent's store, not start a second one
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        # Paddle's variables
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(size),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(attempt.endpoints),
        "PADDLE_CURRENT_ENDPOINT": attempt.endpoints[rank],
        "PADDLE_RANK_IN_NODE": str(local_rank),
        # Every worker sees all selected GPUs, so that LOCAL_RANK is the index of its own.
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus), "FLAGS_selected_gpus": str(local_rank)} if gpus else {}),
        **_interface(attempt, rank=rank, environ=environ),
        **(_terminal(environ) if local_rank == 0 else {}),
    }


def _interface(attempt: Attempt, *, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Tell gloo which interface to use. By default it resolves the host name, which often gives 127.0.1.1."""
    if "GLOO_SOCKET_IFNAME" in environ:
        return {}
    name = nodes.interface_of(attempt.endpoints[rank].rpartition(":")[0])
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def _terminal(environ: Mapping[str, str]) -> dict[str, str]:
    """Worker 0 writes to a file, but if fleetrun echoes it to a terminal, let progress bars treat the file as one."""
    if not sys.stdout.isatty():
        return {}
    size = shutil.get_terminal_size()
    variables = {"COLUMNS": str(size.columns), "LINES": str(size.lines)}
    if "NO_COLOR" not in environ:
        variables |= {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    return {name: value for name, value in variables.items() if name not in environ}


def threads_per_worker(workers: int) -> int:
    """An equal share of the cores that this process may use; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period)) if quota != "max" else cores
    except (OSError, ValueError):
        pass  # no cgroup, or not version 2
    return max(1, cores // workers)


def first_port() -> int | None:
    """$FLAGS_START_PORT, if it is set."""
    value = os.environ.get("FLAGS_START_PORT")
    if not value:
        return None
    if not value.isdigit() or not 1024 < int(value) < 65536:
        raise LaunchError(f"FLAGS_START_PORT={value}: must be a port from 1025 to 65535")
    return int(value)


def endpoints_of(addresses: Sequence[str], *, workers: int) -> tuple[str, ...]:
    """host:port of every rank, given one address per node. Nodes with the same address get different ports."""
    base = first_port() or FIRST_PORT
    ports = {address: itertools.count(base) for address in addresses}
    return tuple(f"{address}:{next(ports[address])}" for address in addresses for _ in range(workers))
