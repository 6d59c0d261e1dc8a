"""Adds up the terms of a plan: the predicted seconds and bytes of one update. Plain arithmetic, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleetx.planner.model_profile import BlockShare, ForwardProfile, ModelProfile, tied_bytes
from fleetx.strategy.cost_model import Cluster, CostTerms, Link
from fleetx.strategy.part import Part

TENSOR_SECONDS = 6e-4  # per tensor that FSDP gathers or scatters on a CPU: Python and small copies
# Segments that FSDP holds gathered or reduces at once: measured, see "Memory" in docs/parts/sharding.md.
SEGMENTS_IN_FLIGHT = 5
Stages = Sequence[Sequence[BlockShare]]


@dataclass(frozen=True)
class StepCost:
    """The seconds of an update by what they are spent on, and the peak memory of a rank."""

    compute: float  # forwards and backwards
    recompute: float  # forwards that are run again
    bubble: float  # waiting for other pipeline stages
    network: float  # communication that does not overlap with backward
    update: float
    overhead: float  # arithmetic of the strategies
    peak: int

    @property
    def seconds(self) -> float:
        return self.compute + self.recompute + self.bubble + self.network + self.update + self.overhead

    def bottleneck(self, memory: int) -> str:
        """What has to improve to make the update faster."""
        if self.recompute > 0.1 * self.seconds or self.peak > memory:
            return "memory"
        compute = self.compute + self.recompute + self.update + self.overhead
        spent = {"compute": compute, "link": self.network, "bubble": self.bubble}
        return max(spent, key=spent.__getitem__)


def terms_of(parts: Sequence[Part], cluster: Cluster, profile: ModelProfile) -> CostTerms:
    terms = CostTerms(cluster, profile.gradients, profile.parameters)
    for part in parts:
        part.cost(terms)
    return terms


def step_cost(
    terms: CostTerms, profile: ModelProfile, variant: ForwardProfile, feed: int, *,
    recompute: float = 0.0, kept: int = 0, peak: int | None = None,
) -> StepCost:  # fmt: skip
    """The cost of an update on a rank that is fed `feed` samples per step.

    recompute: seconds that recomputation adds per step; kept: bytes that strategies keep; peak: if already known.
    """
    n = feed / terms.micro_batches
    forward, backward = variant.forward.at(n), variant.backward.at(n) + recompute
    stages = profile.stages(terms.stages) if terms.stages > 1 else None
    compute, bubble, network = terms.micro_batches * (forward + backward - recompute), 0.0, 0.0
    if terms.stages > 1:
        assert stages is not None
        times = [sum(block.seconds for block in stage) for stage in stages]
        share = max(times) / sum(times)  # of the longest stage in the time of the whole model
        border = max(stage[0].border for stage in stages[1:]) * n * variant.border_ratio
        message = (terms.cluster.outer if terms.cluster.hosts > 1 else terms.cluster.inner).seconds(border)
        compute = terms.micro_batches * (forward + backward) * share
        bubble = (forward + backward) * (1 - share)  # the first micro-batch passes all other stages and comes back
        # While the pipeline fills and drains it waits for every message; in between, for one of the two in each slot.
        network += 2 * (terms.stages - 1) * message + (terms.micro_batches - 1) * message
    if terms.shards > 1:
        network += terms.gathers * _by_segments(terms, terms.cluster.all_gather, terms.parameters, profile.tensors)
        scattered = int(terms.scattered * terms.gradients)
        network += _by_segments(terms, terms.cluster.reduce_scatter, scattered, profile.tensors)
    compute, bubble, network = (terms.merged * x for x in (compute, bubble, network))
    network += _reduction(terms, profile, backward)
    if stages is not None and (tied := sum(tied_bytes(stages))):
        network += _between(terms.cluster.all_reduce, terms.cluster.ranks, 2).seconds(tied)
    if terms.gathered and terms.cluster.ranks > terms.stages:
        network += terms.cluster.all_gather.seconds(terms.gathered / max(terms.stages, terms.shards))
    streamed = terms.streamed + terms.merged * terms.streamed_per_step
    streamed += terms.streamed_per_exchange / terms.reduce_every
    streamed /= terms.stages
    if terms.cluster.ranks > 1 and terms.stages == terms.shards == 1:  # only DDP has buckets besides the gradients
        streamed += terms.bucket_copies
    if peak is None:
        peak = _peak(terms, profile, variant, n, stages) + kept + terms.extra_bytes
    return StepCost(
        compute=compute, recompute=terms.merged * terms.micro_batches * recompute, bubble=bubble, network=network,
        update=_update(terms, profile), overhead=streamed / terms.cluster.bandwidth, peak=peak,
    )  # fmt: skip


def _update(terms: CostTerms, profile: ModelProfile) -> float:
    """The optimizer's own time, measured on one rank that holds everything.

    Where replicas divide its arithmetic, each still reads and writes all it holds: for AdamW, 7 times the parameters.
    """
    split = max(terms.shards, terms.stages)
    mine = profile.update / split
    if not terms.divides_update or terms.shards > 1:
        return mine
    passes = min(7 * profile.parameters / terms.cluster.bandwidth / split, mine)
    return passes + (mine - passes) / terms.replicas


# --- the network ----------------------------------------------------------------------------------
def _by_segments(terms: CostTerms, link: Link, size: int, tensors: int) -> float:
    """One collective per segment. They are assumed not to overlap with compute, which FSDP does only on CUDA."""
    link = _between(link, terms.cluster.ranks, terms.shards)
    handling = tensors * TENSOR_SECONDS if terms.cluster.device == "cpu" else 0.0
    return link.latency * max(size / terms.segment, 1) + size / link.speed + handling


def _between(link: Link, ranks: int, some: int) -> Link:
    """Convert the link of all ranks to one of some of them: a ring of r ranks passes on 2 (r - 1) / r of the bytes."""
    if some in (1, ranks) or ranks == 1:
        return link
    return replace(link, speed=link.speed * ((ranks - 1) / ranks) / ((some - 1) / some))


def _reduction(terms: CostTerms, profile: ModelProfile, backward: float) -> float:
    """The reduction between replicas, once per update: what backward does not hide, and how much it slows backward."""
    split = max(terms.stages, terms.shards)
    replicas = terms.cluster.ranks // split
    if replicas == 1:
        return 0.0
    all_reduce = terms.cluster.all_reduce_16bit.get(terms.dtype, terms.cluster.all_reduce)
    link = terms.link or _between(all_reduce, terms.cluster.ranks, replicas)
    share = terms.sent / split
    if not terms.after_backward:
        return _during_backward(terms, profile, backward, link, share) / terms.reduce_every
    if terms.island == 1:
        return link.seconds(share * terms.gradients) / terms.reduce_every
    islands = replicas // terms.island
    inner, outer = _ring(terms.cluster.inner, terms.island), _ring(terms.cluster.outer, islands)
    seconds = _during_backward(terms, profile, backward, inner, 1 / split)
    if islands > 1:  # and back from the leader of each island to the others
        size = share * terms.gradients
        seconds += (outer.seconds(size) + terms.cluster.inner.seconds(size)) / terms.reduce_every
    return seconds


def _ring(link: Link, ranks: int) -> Link:
    """An all-reduce between ranks that this link joins, per byte of the buffer."""
    passed = 2 * (ranks - 1) / ranks or 1.0
    return replace(link, latency=2 * (ranks - 1) * link.latency, speed=link.speed / passed)


def _during_backward(terms: CostTerms, profile: ModelProfile, backward: float, link: Link, share: float) -> float:
    """What a reduction in buckets adds to backward."""
    slowdown = link.busy * share * terms.gradients if terms.cluster.device == "cpu" else 0.0
    length = backward + slowdown
    total = sum(block.seconds for block in profile.blocks) or 1.0
    clock = free = ready = 0.0  # the time in backward, when the link is free, bytes that wait for a full bucket
    for block in reversed(profile.blocks):
        clock += length * block.seconds / total
        ready += share * block.gradients
        if ready >= share * terms.bucket:
            free = max(clock, free) + link.seconds(ready)
            ready = 0.0
    rest = share * (terms.gradients - sum(block.gradients for block in profile.blocks)) + ready
    free = max(length, free) + link.seconds(rest) if rest > 0 else free
    return max(free, length) - backward


# --- bytes ----------------------------------------------------------------------------------------
def _peak(terms: CostTerms, profile: ModelProfile, variant: ForwardProfile, n: float, stages: Stages | None) -> int:
    running, updating = variant.peak.at(n), float(profile.update_peak)
    if stages is not None:
        running = updating = max(_stage_peak(terms, profile, variant, n, stages, i) for i in range(len(stages)))
    elif terms.shards > 1:
        segment, largest = min(terms.segment, profile.parameters), max(profile.largest_segment, 0)
        if terms.gathers == 1:
            # A module larger than a segment needs room for its gradient and for what is scattered as well.
            gathered = profile.parameters + (segment if largest <= terms.segment else 2 * largest)
        else:
            gathered = max(min(SEGMENTS_IN_FLIGHT * segment, profile.parameters), 3 * largest)
        running = profile.fixed / terms.shards + gathered + variant.peak.slope * n
        running += profile.gradients if terms.merged > 1 else 0  # FSDP sums full gradients until it reduces them
        updating = profile.update_peak / terms.shards
    elif terms.merged > 1 and terms.cluster.ranks > 1:
        running += profile.gradients  # DDP's buckets, in addition to the gradients that are merged outside it
    if terms.averages_parameters and stages is None:
        updating = max(updating, profile.fixed / terms.shards + profile.averaging)
    return int(max(running, updating))


def _stage_peak(
    terms: CostTerms, profile: ModelProfile, variant: ForwardProfile, n: float, stages: Stages, number: int
) -> float:
    """1F1B: the first stage has as many micro-batches in flight as there are stages, the last stage has one."""
    saved = [sum(block.saved for block in stage) or 1 for stage in stages]
    held = [sum(block.gradients for block in stage) for stage in stages]
    share = (held[number] + tied_bytes(stages)[number]) / (sum(held) or 1)
    in_flight = min(terms.micro_batches, len(stages) - number)
    once = max(variant.peak.base - variant.cast_bytes - profile.fixed, 0.0)  # the gradient being computed
    activations = variant.peak.slope * n * saved[number] / sum(saved)
    return profile.fixed * share + once + in_flight * (variant.cast_bytes * share + activations)
