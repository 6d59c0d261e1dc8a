"""Which process is this? Read from the launcher's environment, or given by the user. No torch here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from fleetx.errors import WorldError


@dataclass(frozen=True)
class ProcessInfo:
    """One process of `size`. `master` is the host:port of the rendezvous; if empty, torch's own variables have it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    endpoints: tuple[str, ...] = ("127.0.0.1:0",)
    master: str = ""
    launched: bool = False


def from_environment(env: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Rank and size that a launcher gave this process; without a launcher, a world of one."""
    if "RANK" in env or "WORLD_SIZE" in env:
        return _from_torch(env)
    if "PADDLE_TRAINER_ID" in env:
        return _from_paddle(env)
    mpi = next((names for names in _MPI if names[0] in env), None)
    srun = "SLURM_STEP_ID" in env and "SLURM_PROCID" in env  # a step: inside srun, not just inside a job
    if srun and (mpi is None or not _inside_of_step(env, *mpi[:2])):
        return _from_slurm(env)
    return ProcessInfo() if mpi is None else _from_mpi(env, *mpi)


def several_nodes(env: Mapping[str, str]) -> str:
    """The scheduler's variable that announces several nodes, or "". Such variables do not say which worker this is."""
    for name, one in (("PET_NNODES", "1"), ("SKYPILOT_NUM_NODES", "1"), ("SM_HOSTS", "")):
        value = env.get(name, one)
        if value != one and (one or "," in value):
            return f"{name}={value[:100]}"
    return ""


def _from_torch(env: Mapping[str, str]) -> ProcessInfo:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    rank, size = _rank_and_size(env, "RANK", "WORLD_SIZE")
    if missing:
        raise WorldError(
            f"torchrun's variables are incomplete: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            "missing. Start the script with fleetrun"
        )
    if not 0 < _number(env, "MASTER_PORT", 0) < 65536:
        raise WorldError(f"MASTER_PORT={env['MASTER_PORT']}: must be a port from 1 to 65535")
    local = _number(env, "LOCAL_RANK", 0)
    if not 0 <= local < size:
        raise WorldError(f"LOCAL_RANK={local}: must be from 0 to {size - 1}, because WORLD_SIZE={size}")
    endpoints = _list(env, "PADDLE_TRAINER_ENDPOINTS") or _made_up(env["MASTER_ADDR"], size)
    return ProcessInfo(rank, size, local, endpoints, launched=True)


def _from_paddle(env: Mapping[str, str]) -> ProcessInfo:
    endpoints = _list(env, "PADDLE_TRAINER_ENDPOINTS")
    if "PADDLE_TRAINERS_NUM" not in env:
        raise WorldError("PADDLE_TRAINER_ID is set, but PADDLE_TRAINERS_NUM is not: start the script with fleetrun")
    rank, size = _rank_and_size(env, "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")
    if size == 1 and not endpoints:
        return ProcessInfo(launched=False)
    if len(endpoints) != size:
        raise WorldError(
            f"PADDLE_TRAINER_ENDPOINTS lists {len(endpoints)} addresses, but PADDLE_TRAINERS_NUM={size}: list one per "
            "worker"
        )
    current = env.get("PADDLE_CURRENT_ENDPOINT", endpoints[rank])
    if current != endpoints[rank]:
        raise WorldError(
            f"PADDLE_CURRENT_ENDPOINT={current} is not number {rank} of PADDLE_TRAINER_ENDPOINTS, {endpoints[rank]}: "
            "start the script with fleetrun"
        )
    host = current.rpartition(":")[0]
    local = [e for e in endpoints if e.rpartition(":")[0] == host].index(current)
    return ProcessInfo(rank, size, _number(env, "PADDLE_RANK_IN_NODE", local), endpoints, endpoints[0], launched=True)


def _from_slurm(env: Mapping[str, str]) -> ProcessInfo:
    rank, size = _rank_and_size(env, "SLURM_PROCID", _slurm_tasks(env))
    host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", ""))
    # All tasks of a job must choose the same port without communicating: derive it from the job's number.
    port = env.get("MASTER_PORT") or str(20000 + _number(env, "SLURM_JOB_ID", 0) % 20000)
    return ProcessInfo(
        rank, size, _number(env, "SLURM_LOCALID", 0), _made_up(host, size), f"{host}:{port}", launched=size > 1
    )


def _slurm_tasks(env: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"


# Variables of Open MPI, and of MPICH and Intel MPI: rank, size, rank and size on this machine, and mpirun's job id.
_MPI = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "OMPI_MCA_ess_base_jobid"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
]  # fmt: skip


def _inside_of_step(env: Mapping[str, str], rank_name: str, size_name: str) -> bool:
    """Did mpirun start this process inside a step? mpirun also starts its own daemons with srun.

    srun itself sets PMI_* to its own rank and size, and none of Open MPI's variables.
    """
    return not rank_name.startswith("PMI") or env.get(size_name) != env.get(_slurm_tasks(env))


def _from_mpi(env: Mapping[str, str], rank_name: str, size_name: str, local: str, here: str, job: str) -> ProcessInfo:
    rank, size = _rank_and_size(env, rank_name, size_name)
    host = env.get("MASTER_ADDR")
    if host is None and _number(env, here, size) < size:
        raise WorldError(
            f"mpirun started {size} workers on several machines: pass the address of the first one, as in "
            "`mpirun -x MASTER_ADDR=10.0.0.1` (Open MPI) or `mpirun -genv MASTER_ADDR 10.0.0.1` (MPICH)"
        )
    host = host or "127.0.0.1"
    port = env.get("MASTER_PORT") or (str(20000 + _number(env, job, 0) % 20000) if job in env else "29500")
    return ProcessInfo(rank, size, _number(env, local, 0), _made_up(host, size), f"{host}:{port}", launched=size > 1)


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: `gpu[07-09,12],login` -> gpu07."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?", nodes)
    if not found:
        raise WorldError(f"cannot read a host from SLURM_NODELIST={nodes!r}: set MASTER_ADDR")
    return found.group(1) + (found.group(2) or "")


def _made_up(host: str, size: int) -> tuple[str, ...]:
    return tuple(f"{host}:{rank}" for rank in range(size))


def _list(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(e for e in env.get(name, "").split(",") if e)


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, default))
    except ValueError:
        raise WorldError(f"{name}={env[name]}: must be a whole number") from None


def _rank_and_size(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(env, rank_name, 0), _number(env, size_name, 1)
    if size < 1:
        raise WorldError(f"{size_name}={size}: must be at least 1")
    if not 0 <= rank < size:
        raise WorldError(f"{rank_name}={rank}: must be from 0 to {size - 1}, because {size_name}={size}")
    return rank, size


class Role(IntEnum):
    """Paddle's kinds of processes. Collective training has only workers."""

    WORKER = 1
    SERVER = 2
    HETER_WORKER = 3


# --- Paddle's role makers ------------------------------------------------------------------------
@dataclass(frozen=True)
class PaddleCloudRoleMaker:
    """Read rank and size from the environment."""

    is_collective: bool = False

    def process(self) -> ProcessInfo:
        return from_environment()


@dataclass(frozen=True)
class UserDefinedRoleMaker:
    """The user gives them: rank `current_id` of `worker_num`, rendezvous at the first of `worker_endpoints`."""

    is_collective: bool = False
    current_id: int = 0
    role: Role = Role.WORKER
    worker_num: int = 1
    worker_endpoints: Sequence[str] = field(default_factory=list)

    def process(self) -> ProcessInfo:
        if self.role is not Role.WORKER:
            raise WorldError(f"role={self.role!r}: must be Role.WORKER, the only role in collective training")
        if not 0 <= self.current_id < self.worker_num:
            raise WorldError(f"current_id={self.current_id}: must be from 0 to {self.worker_num - 1} (worker_num - 1)")
        if self.worker_num == 1:
            return ProcessInfo()
        ends = tuple(self.worker_endpoints)
        if len(ends) != self.worker_num:
            raise WorldError(
                f"worker_endpoints lists {len(ends)} addresses for worker_num={self.worker_num}: list one per worker"
            )
        host = ends[self.current_id].rpartition(":")[0]
        local = [e for e in ends if e.rpartition(":")[0] == host].index(ends[self.current_id])
        return ProcessInfo(self.current_id, self.worker_num, local, ends, ends[0], launched=True)
