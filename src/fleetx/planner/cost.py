"""Adds a bill up: the seconds and bytes of one update, predicted. No torch here: it answers for other machines too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleetx.planner.model_profile import Piece, Way, Work
from fleetx.strategy.cost_model import Bill, Link, Scene
from fleetx.strategy.part import Part

TENSOR = 6e-4  # seconds for each tensor that FSDP gathers or scatters, of Python and of small copies, on a CPU
IN_FLIGHT = 5  # segments that FSDP has gathered, or reduces, at once: measured, see docs/results/pipeline.md


@dataclass(frozen=True)
class Account:
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


def bill_of(parts: Sequence[Part], scene: Scene, work: Work) -> Bill:
    bill = Bill(scene, work.gradients, work.parameters)
    for part in parts:
        part.cost(bill)
    return bill


def account(
    bill: Bill, work: Work, way: Way, feed: int, *, again: float = 0.0, kept: int = 0, peak: int | None = None
) -> Account:
    """Of a rank that is given `feed` samples at a time.

    again: seconds that recomputation adds to each step; kept: bytes that strategies keep; peak: if it is known better.
    """
    n = feed / bill.micro
    forward, backward = way.forward.at(n), way.backward.at(n) + again
    stages = work.stages(bill.stages) if bill.stages > 1 else None
    compute, waiting, network = bill.micro * (forward + backward - again), 0.0, 0.0
    if bill.stages > 1:
        assert stages is not None
        share = _share(stages)
        slot = (forward + backward) * share
        border = max(stage[0].border for stage in stages[1:]) * n
        message = (bill.scene.outer if bill.scene.hosts > 1 else bill.scene.inner).seconds(border * way.border)
        compute = bill.micro * slot
        waiting = (forward + backward) * (1 - share)  # for the first to come through all other stages, and back
        # While the pipeline fills and drains each message is waited for; between, one of the two in a slot.
        network += 2 * (bill.stages - 1) * message + (bill.micro - 1) * message
    if bill.shards > 1:
        network += bill.gathers * _pieces(bill, bill.scene.gather, bill.parameters, work.tensors)
        network += _pieces(bill, bill.scene.scatter, bill.gradients, work.tensors)
    compute, waiting, network = (bill.merged * x for x in (compute, waiting, network))
    network += _reduction(bill, work, backward)
    if stages is not None and (tied := sum(work.tied(stages))):
        network += _among(bill.scene.flat, bill.scene.ranks, 2).seconds(tied)
    held = max(bill.shards, bill.stages)
    streamed = (bill.streamed + bill.merged * bill.each) / bill.stages + _copied(bill)
    return Account(
        compute=compute, again=bill.merged * bill.micro * again, waiting=waiting, network=network,
        update=work.update / held, beside=streamed / bill.scene.stream,
        peak=peak if peak is not None else _peak(bill, work, way, n, stages) + kept + bill.bytes,
    )  # fmt: skip


def _copied(bill: Bill) -> float:
    """Only DDP has buckets beside the gradients."""
    return bill.buckets if bill.scene.ranks > 1 and bill.stages == bill.shards == 1 else 0.0


# --- the network ----------------------------------------------------------------------------------
def _pieces(bill: Bill, link: Link, size: int, tensors: int) -> float:
    """As many gatherings, or scatterings, as there are segments. They are not hidden: FSDP does so on CUDA only."""
    link = _among(link, bill.scene.ranks, bill.shards)
    handled = tensors * TENSOR if bill.scene.device == "cpu" else 0.0
    return link.latency * max(size / bill.segment, 1) + size / link.speed + handled


def _among(link: Link, ranks: int, some: int) -> Link:
    """The all-reduce of all ranks -> that of some of them: a ring of r passes 2 (r - 1) / r of the bytes."""
    if some in (1, ranks) or ranks == 1:
        return link
    return replace(link, speed=link.speed * ((ranks - 1) / ranks) / ((some - 1) / some))


def _reduction(bill: Bill, work: Work, backward: float) -> float:
    """Between replicas, once in an update: what is left of it when backward is over, and what it takes from that."""
    replicas = bill.scene.ranks // max(bill.stages, bill.shards)
    if replicas == 1:
        return 0.0
    link = bill.way or _among(bill.scene.sixteen.get(bill.dtype, bill.scene.flat), bill.scene.ranks, replicas)
    share = bill.sent / max(bill.stages, bill.shards)
    if bill.late:
        return link.seconds(share * bill.gradients) / bill.every
    stolen = link.busy * share * bill.gradients if bill.scene.device == "cpu" else 0.0
    length = backward + stolen
    whole = sum(piece.seconds for piece in work.pieces) or 1.0
    clock = free = waiting = 0.0
    for piece in reversed(work.pieces):
        clock += length * piece.seconds / whole
        waiting += share * piece.gradients
        if waiting >= share * bill.bucket:
            free = max(clock, free) + link.seconds(waiting)
            waiting = 0.0
    rest = share * (bill.gradients - sum(piece.gradients for piece in work.pieces)) + waiting
    free = max(length, free) + link.seconds(rest) if rest > 0 else free
    return (max(free, length) - backward) / bill.every


# --- bytes ----------------------------------------------------------------------------------------
def _share(stages: Sequence[Sequence[Piece]]) -> float:
    """Of the time of the whole model, what the longest stage takes."""
    times = [sum(piece.seconds for piece in stage) for stage in stages]
    return max(times) / sum(times)


def _peak(bill: Bill, work: Work, way: Way, n: float, stages: Sequence[Sequence[Piece]] | None) -> int:
    line = way.peak
    running, floor = line.at(n), float(work.floor)
    if stages is not None:
        running = floor = max(_stage_peak(bill, work, way, n, stages, number) for number in range(len(stages)))
    elif bill.shards > 1:
        divided = work.fixed / bill.shards
        segments, huge = min(bill.segment, work.parameters), max(work.segment, 0)
        # Of one module that is larger than a segment should be, the gradient and what is scattered come beside it.
        most = work.parameters + (segments if huge <= bill.segment else 2 * huge)
        gathered = most if bill.gathers == 1 else max(min(IN_FLIGHT * segments, work.parameters), 3 * huge)
        running = divided + gathered + line.slope * n
        floor = work.floor / bill.shards
        running += work.gradients if bill.merged > 1 else 0  # FSDP adds up whole gradients until it reduces them
    elif bill.merged > 1 and bill.scene.ranks > 1:
        running += work.gradients  # DDP's buckets, beside the gradients that are merged without it
    if bill.averages and stages is None:
        floor = max(floor, work.fixed + work.averaged)
    return int(max(running, floor))


def _stage_peak(bill: Bill, work: Work, way: Way, n: float, stages: Sequence[Sequence[Piece]], number: int) -> float:
    """1F1B: the first stage has as many micro-batches under way as there are stages, the last has one."""
    saved = [sum(piece.saved for piece in stage) or 1 for stage in stages]
    held = [sum(piece.gradients for piece in stage) for stage in stages]
    share = (held[number] + work.tied(stages)[number]) / (sum(held) or 1)
    under_way = min(bill.micro, len(stages) - number)
    once = max(way.peak.base - way.casts - work.fixed, 0.0)  # the gradient in hand
    activations = way.peak.slope * n * saved[number] / sum(saved)
    return work.fixed * share + once + under_way * (way.casts * share + activations)
