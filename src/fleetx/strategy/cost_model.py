"""The cost of one update on one rank: parts fill in CostTerms, and the planner adds them up. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Allow = Literal["exact", "bf16", "lossy"]
ALLOWED: dict[str, tuple[Allow, ...]] = {
    "exact": ("exact",),
    "bf16": ("exact", "bf16"),
    "lossy": ("exact", "bf16", "lossy"),
}


@dataclass(frozen=True)
class Link:
    """Sending n bytes takes `latency + n / speed` seconds and slows down concurrent compute by `busy * n` seconds."""

    latency: float  # seconds
    speed: float  # bytes per second
    busy: float = 0.0  # seconds of compute lost per byte

    def seconds(self, size: float) -> float:
        return self.latency + size / self.speed


@dataclass(frozen=True)
class Cluster:
    """The ranks and links that a plan runs on: measured, or described by the user for a what-if question."""

    ranks: int
    ranks_per_host: int
    all_reduce: Link  # between all ranks, per byte of gradients
    all_gather: Link  # between all ranks, per byte of the gathered tensor
    reduce_scatter: Link  # between all ranks, per byte of the full tensor
    inner: Link  # point to point, within a host
    outer: Link  # point to point, between hosts; equal to `inner` if there is only one host
    bandwidth: float  # bytes per second that elementwise operations read and write
    memory: int  # bytes per rank
    all_reduce_16bit: Mapping[str, Link]  # like `all_reduce`, by the name of the 16-bit dtype
    device: str = "cpu"
    global_batch: int | None = None  # samples per update; None: every rank keeps the batch size of the sample

    @property
    def hosts(self) -> int:
        return self.ranks // self.ranks_per_host


@dataclass(frozen=True)
class Offer:
    """Settings of a part that `auto` may try, and the `allow` level that they need."""

    settings: Mapping[str, Any]
    needs: Allow = "exact"


@dataclass
class CostTerms:
    """Parts change the terms in any order: each only multiplies, adds, or sets a term that no other part sets."""

    cluster: Cluster
    gradients: int  # bytes of all gradients
    parameters: int  # bytes of all parameters
    merged: int = 1  # steps per update
    stages: int = 1  # ranks in a pipeline
    micro_batches: int = 1  # per step of a pipeline
    shards: int = 1  # ranks that share each tensor
    gathers: int = 0  # all-gathers of sharded parameters per step
    sent: float = 1.0  # bytes reduced per byte of gradients
    scattered: float = 1.0  # bytes reduce-scattered between shards per byte of gradients
    reduce_every: int = 1  # updates per reduction
    island: int = 1  # ranks that also reduce gradients among themselves in every update
    after_backward: bool = False  # the reduction starts after backward instead of overlapping with it
    averages_parameters: bool = False  # parameters are reduced instead of gradients
    link: Link | None = None  # used by the reduction instead of `cluster.all_reduce`
    dtype: str = ""  # the 16-bit dtype of the reduction
    bucket: float = 0.0  # bytes per reduction while backward runs
    segment: float = 0.0  # bytes of sharded parameters per all-gather
    divides_update: bool = False  # replicas divide the arithmetic of the update between them
    gathered: float = 0.0  # bytes of updates that ranks send each other before they apply them
    bucket_copies: float = 0.0  # bytes read and written to copy gradients into buckets
    streamed: float = 0.0  # other bytes read and written per update
    streamed_per_step: float = 0.0
    streamed_per_exchange: float = 0.0  # the same, each time the ranks reduce
    extra_bytes: int = 0  # memory on top of what the parts report in `keeps`; may be negative

    @property
    def replicas(self) -> int:
        """How many ranks, or pipelines, train on different batches."""
        return self.cluster.ranks // self.stages
