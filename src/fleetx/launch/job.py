"""The checked command line (Job), and what the workers of one attempt share (Attempt)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked command line: no later step needs to check it again."""

    target: str  # path of the script, or name of the module
    module: bool
    arguments: tuple[str, ...]
    device: str  # cpu | cuda
    gpus: tuple[str, ...]  # indices or UUIDs, one per worker; empty on the CPU
    workers: int  # on this node, at most
    threads: int | None  # OMP_NUM_THREADS of a worker; None if the user has set it
    nodes: int
    rank: int  # of this node
    address: str | None  # of this node, if --ips is given
    master: tuple[str, int] | None  # where several nodes rendezvous; None on a single node
    paddle_api: str | None  # fleetx | paddle; None for Paddle if it is installed
    log_dir: Path
    max_restarts: int
    restart_delay: int  # seconds, see agent.py
    warm: bool  # whether a fork server starts the workers of a restart
    preload: tuple[str, ...]  # what the fork server imports besides torch and fleetx
    elastic: int | None  # the fewest workers (on a single node) or nodes to continue with; None if all are needed
    regrow_after: int  # seconds until workers that were left out come back, on a single node
    grace_period: int  # seconds that workers have after SIGTERM, or when others come or go, to save their state
    stop_timeout: int  # seconds between asking a worker to stop and killing it
    join_timeout: int  # seconds to wait for the other nodes
    secret: bytes = field(default=b"", repr=False)  # by which nodes recognize each other

    @property
    def single_node(self) -> bool:
        return self.nodes == 1


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of all workers: where they rendezvous and the endpoint of each."""

    number: int  # 0, then 1 for the first restart, ...
    run_id: str
    master_addr: str
    master_port: int
    endpoints: tuple[str, ...]  # host:port of every rank, on all nodes
    nodes: int  # that take part
    node: int  # position of this node among them
    slots: tuple[int, ...]  # which workers of this node take part; the position is the local rank
    restarts: int  # how many of the attempts before this one failed

    @property
    def first_rank(self) -> int:
        """The rank of the first worker of this node."""
        return self.node * len(self.slots)
