"""What was asked for (Job), and what the workers of one attempt are told about each other (World)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked command line. Nothing in it needs to be questioned again."""

    target: str  # path of the script, or name of the module
    module: bool
    arguments: tuple[str, ...]
    device: str  # cpu | cuda
    gpus: tuple[str, ...]  # ids or UUIDs, one a worker; empty on the CPU
    workers: int  # on this node
    threads: int | None  # OMP_NUM_THREADS of a worker; None: the user has set it
    nodes: int
    rank: int  # of this node
    address: str | None  # of this node, if --ips names it
    master: tuple[str, int] | None  # where many nodes meet; None on one node
    paddle_api: str | None  # fleetx | paddle; None: Paddle if it is installed
    log_dir: Path
    max_restarts: int
    stop_timeout: int  # seconds between asking a worker to stop and killing it
    join_timeout: int  # seconds to wait for the other nodes

    @property
    def alone(self) -> bool:
        return self.nodes == 1


@dataclass(frozen=True, kw_only=True)
class World:
    """One attempt: where its workers meet and which endpoint each of them has."""

    attempt: int  # 0, then 1 for the first restart ...
    run_id: str
    master_addr: str
    master_port: int
    endpoints: tuple[str, ...]  # host:port by rank, of all nodes
