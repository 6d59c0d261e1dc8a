"""What one update costs a rank: the parts of a plan fill in a terms, and the planner adds it up. No torch here."""

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
    """n bytes take `latency + n / speed` seconds; what is computed meanwhile takes `busy * n` seconds longer."""

    latency: float
    speed: float  # bytes a second
    busy: float = 0.0  # seconds a byte

    def seconds(self, size: float) -> float:
        return self.latency + size / self.speed


@dataclass(frozen=True)
class Cluster:
    """Where the training runs, as it was measured or as it was asked about."""

    ranks: int
    inside: int  # ranks on each host
    flat: Link  # an all-reduce between all ranks, of so many bytes of gradients
    gather: Link  # all ranks gather so many bytes of divided parameters
    scatter: Link  # all ranks reduce so many bytes of gradients, each to keep a part
    inner: Link  # from rank to rank on one host
    outer: Link  # between hosts; as `inner` where there is one
    stream: float  # bytes a second that simple arithmetic on tensors reads and writes
    memory: int  # bytes that a rank may use
    sixteen: Mapping[str, Link]  # as `flat`, by the name of a type of 16 bits
    device: str = "cpu"
    global_batch: int | None = None  # samples in an update; None: each rank goes on with batches of the sample's size

    @property
    def hosts(self) -> int:
        return self.ranks // self.inside


@dataclass(frozen=True)
class Offer:
    """Settings of a part that may be tried in the user's place, and what must be allowed for that."""

    settings: Mapping[str, Any]
    needs: Allow = "exact"


@dataclass
class CostTerms:
    """Parts change it in any order, so each does nothing but multiply, add, or set what is its own."""

    cluster: Cluster
    gradients: int  # bytes of all gradients
    parameters: int  # bytes of all parameters
    merged: int = 1  # steps in an update
    stages: int = 1  # ranks in a pipeline
    micro: int = 1  # micro-batches into which a pipeline cuts a batch
    shards: int = 1  # ranks over which each tensor is divided
    gathers: int = 0  # times in a step that divided parameters are gathered
    sent: float = 1.0  # bytes that are reduced for each byte of gradients
    every: int = 1  # updates between two reductions
    late: bool = False  # is it reduced when backward is over, and not while it runs?
    averages: bool = False  # are parameters reduced, and not gradients?
    way: Link | None = None  # by which it is reduced, if not by the flat one
    dtype: str = ""  # of 16 bits, if it is reduced in one
    bucket: float = 0.0  # bytes that are reduced at a time while backward runs
    segment: float = 0.0  # bytes of divided parameters that are gathered at a time
    buckets: float = 0.0  # bytes that are read and written to bring gradients into buckets, while backward runs
    streamed: float = 0.0  # bytes that are read and written besides, in an update
    each: float = 0.0  # and in each step of it
    bytes: int = 0  # more, or fewer, than the parts say that they keep

    @property
    def replicas(self) -> int:
        """How many batches are taken at once."""
        return self.cluster.ranks // self.stages
