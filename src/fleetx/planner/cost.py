"""Adds a terms up: the seconds and bytes of one update, predicted. No torch here: it answers for other machines too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleetx.planner.model_profile import Piece, Way, Work
from fleetx.strategy.cost_model import Cluster, CostTerms, Link
from fleetx.strategy.part import Part

TENSOR = 6e-4  # seconds for each tensor that FSDP gathers or scatters, of Python and of small copies, on a CPU
IN_FLIGHT = 5  # segments that FSDP has gathered, or reduces, at once: measured, see docs/results/pipeline.md


@dataclass(frozen=True)
class StepCost:
    """Seconds of an update, by what they are spent on; and the peak of a rank."""

    compute: float  # forwards and backwards, without waiting
    again: float  # forwards that recomputation adds
    waiting: float  # for other stages
    network: float  # that is not hidden behind backward
    update: float
    beside: float  # arithmetic of the strategies
    peak: int

    @property
    def seconds(self) -> float:
        return self.compute + self.again + self.waiting + self.network + self.update + self.beside

    def limit(self, memory: int) -> str:
        """What would have to be better, for it to be faster."""
        spent = {"compute": self.compute + self.again + self.update + self.beside, "link": self.network,
                 "bubble": self.waiting}  # fmt: skip
        if self.again > 0.1 * self.seconds or self.peak > memory:
            return "memory"
        return max(spent, key=spent.__getitem__)


def terms_of(parts: Sequence[Part], cluster: Cluster, work: Work) -> CostTerms:
    terms = CostTerms(cluster, work.gradients, work.parameters)
    for part in parts:
        part.cost(terms)
    return terms


def account(
    terms: CostTerms, work: Work, way: Way, feed: int, *, again: float = 0.0, kept: int = 0, peak: int | None = None
) -> StepCost:
    """Of a rank that is given `feed` samples at a time.

    again: seconds that recomputation adds to each step; kept: bytes that strategies keep; peak: if it is known better.
    """
    n = feed / terms.micro
    forward, backward = way.forward.at(n), way.backward.at(n) + again
    stages = work.stages(terms.stages) if terms.stages > 1 else None
    compute, waiting, network = terms.micro * (forward + backward - again), 0.0, 0.0
    if terms.stages > 1:
        assert stages is not None
        share = _share(stages)
        slot = (forward + backward) * share
        border = max(stage[0].border for stage in stages[1:]) * n
        message = (terms.cluster.outer if terms.cluster.hosts > 1 else terms.cluster.inner).seconds(border * way.border)
        compute = terms.micro * slot
        waiting = (forward + backward) * (1 - share)  # for the first to come through all other stages, and back
        # While the pipeline fills and drains each message is waited for; between, one of the two in a slot.
        network += 2 * (terms.stages - 1) * message + (terms.micro - 1) * message
    if terms.shards > 1:
        network += terms.gathers * _pieces(terms, terms.cluster.gather, terms.parameters, work.tensors)
        network += _pieces(terms, terms.cluster.scatter, terms.gradients, work.tensors)
    compute, waiting, network = (terms.merged * x for x in (compute, waiting, network))
    network += _reduction(terms, work, backward)
    if stages is not None and (tied := sum(work.tied(stages))):
        network += _among(terms.cluster.flat, terms.cluster.ranks, 2).seconds(tied)
    held = max(terms.shards, terms.stages)
    streamed = (terms.streamed + terms.merged * terms.each) / terms.stages + _copied(terms)
    return StepCost(
        compute=compute, again=terms.merged * terms.micro * again, waiting=waiting, network=network,
        update=work.update / held, beside=streamed / terms.cluster.stream,
        peak=peak if peak is not None else _peak(terms, work, way, n, stages) + kept + terms.bytes,
    )  # fmt: skip


def _copied(terms: CostTerms) -> float:
    """Only DDP has buckets beside the gradients."""
    return terms.buckets if terms.cluster.ranks > 1 and terms.stages == terms.shards == 1 else 0.0


# --- the network ----------------------------------------------------------------------------------
def _pieces(terms: CostTerms, link: Link, size: int, tensors: int) -> float:
    """As many gatherings, or scatterings, as there are segments. They are not hidden: FSDP does so on CUDA only."""
    link = _among(link, terms.cluster.ranks, terms.shards)
    handled = tensors * TENSOR if terms.cluster.device == "cpu" else 0.0
    return link.latency * max(size / terms.segment, 1) + size / link.speed + handled


def _among(link: Link, ranks: int, some: int) -> Link:
    """The all-reduce of all ranks -> that of some of them: a ring of r passes 2 (r - 1) / r of the bytes."""
    if some in (1, ranks) or ranks == 1:
        return link
    return replace(link, speed=link.speed * ((ranks - 1) / ranks) / ((some - 1) / some))


def _reduction(terms: CostTerms, work: Work, backward: float) -> float:
    """Between replicas, once in an update: what is left of it when backward is over, and what it takes from that."""
    replicas = terms.cluster.ranks // max(terms.stages, terms.shards)
    if replicas == 1:
        return 0.0
    link = terms.way or _among(
        terms.cluster.sixteen.get(terms.dtype, terms.cluster.flat), terms.cluster.ranks, replicas
    )
    share = terms.sent / max(terms.stages, terms.shards)
    if terms.late:
        return link.seconds(share * terms.gradients) / terms.every
    stolen = link.busy * share * terms.gradients if terms.cluster.device == "cpu" else 0.0
    length = backward + stolen
    whole = sum(piece.seconds for piece in work.pieces) or 1.0
    clock = free = waiting = 0.0
    for piece in reversed(work.pieces):
        clock += length * piece.seconds / whole
        waiting += share * piece.gradients
        if waiting >= share * terms.bucket:
            free = max(clock, free) + link.seconds(waiting)
            waiting = 0.0
    rest = share * (terms.gradients - sum(piece.gradients for piece in work.pieces)) + waiting
    free = max(length, free) + link.seconds(rest) if rest > 0 else free
    return (max(free, length) - backward) / terms.every


# --- bytes ----------------------------------------------------------------------------------------
def _share(stages: Sequence[Sequence[Piece]]) -> float:
    """Of the time of the whole model, what the longest stage takes."""
    times = [sum(piece.seconds for piece in stage) for stage in stages]
    return max(times) / sum(times)


def _peak(terms: CostTerms, work: Work, way: Way, n: float, stages: Sequence[Sequence[Piece]] | None) -> int:
    line = way.peak
    running, floor = line.at(n), float(work.floor)
    if stages is not None:
        running = floor = max(_stage_peak(terms, work, way, n, stages, number) for number in range(len(stages)))
    elif terms.shards > 1:
        divided = work.fixed / terms.shards
        segments, huge = min(terms.segment, work.parameters), max(work.segment, 0)
        # Of one module that is larger than a segment should be, the gradient and what is scattered come beside it.
        most = work.parameters + (segments if huge <= terms.segment else 2 * huge)
        gathered = most if terms.gathers == 1 else max(min(IN_FLIGHT * segments, work.parameters), 3 * huge)
        running = divided + gathered + line.slope * n
        floor = work.floor / terms.shards
        running += work.gradients if terms.merged > 1 else 0  # FSDP adds up whole gradients until it reduces them
    elif terms.merged > 1 and terms.cluster.ranks > 1:
        running += work.gradients  # DDP's buckets, beside the gradients that are merged without it
    if terms.averages and stages is None:
        floor = max(floor, work.fixed + work.averaged)
    return int(max(running, floor))


def _stage_peak(
    terms: CostTerms, work: Work, way: Way, n: float, stages: Sequence[Sequence[Piece]], number: int
) -> float:
    """1F1B: the first stage has as many micro-batches under way as there are stages, the last has one."""
    saved = [sum(piece.saved for piece in stage) or 1 for stage in stages]
    held = [sum(piece.gradients for piece in stage) for stage in stages]
    share = (held[number] + work.tied(stages)[number]) / (sum(held) or 1)
    under_way = min(terms.micro, len(stages) - number)
    once = max(way.peak.base - way.casts - work.fixed, 0.0)  # the gradient in hand
    activations = way.peak.slope * n * saved[number] / sum(saved)
    return work.fixed * share + once + under_way * (way.casts * share + activations)
