"""The schedules by their names, and how many stages, ranks and micro-batches each can do with. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

SINGLE, ANY, TWO = 1, 0, 2  # stages on a rank
# By the names of Paddle and of torch: torch's class, and stages on a rank.
MODES: dict[str, tuple[str, int]] = {
    "1F1B": ("Schedule1F1B", SINGLE),
    "F-then-B": ("ScheduleGPipe", SINGLE),
    "GPipe": ("ScheduleGPipe", SINGLE),
    "Interleaved1F1B": ("ScheduleInterleaved1F1B", ANY),
    "LoopedBFS": ("ScheduleLoopedBFS", ANY),
    "InterleavedZeroBubble": ("ScheduleInterleavedZeroBubble", ANY),
    "ZBVZeroBubble": ("ScheduleZBVZeroBubble", TWO),
    "DualPipeV": ("ScheduleDualPipeV", TWO),
}
_BACK_AND_FORTH = ("ZBVZeroBubble", "DualPipeV")


def per_rank(mode: str) -> int:
    """Stages on a rank, where nobody says how many."""
    return MODES[mode][1] or 2


def ranks(stages: int | None, degree: int | None, mode: str, world: int) -> int:
    """Of one pipeline."""
    if degree is not None:
        return degree
    return max(1, stages // per_rank(mode)) if stages is not None else world


def problems(stages: int | None, degree: int | None, mode: str, world: int) -> Iterator[str]:
    found, each = ranks(stages, degree, mode, world), MODES[mode][1]
    total = stages if stages is not None else found * per_rank(mode)
    if found > world:
        yield (
            f"pipeline has {total} stages for {found} ranks, and there are {world}: start {found} workers, or make "
            f"{world * per_rank(mode)} stages"
        )
    elif world % found:
        good = [n for n in range(1, world + 1) if world % n == 0]
        near = sorted(sorted(good, key=lambda n: abs(n - found))[:2])
        more = world + found - world % found
        yield (
            f"{world} ranks do not divide into pipelines of {found}: use pipelines of {' or '.join(map(str, near))}, "
            f"or start {world - world % found} or {more} workers"
        )
    if total < found or total % found:
        yield f"{total} stages cannot be shared out evenly among {found} ranks: make {found} or {2 * found} stages"
    elif each and total != each * found and found > 1:
        yield (
            f"{mode} needs {'one stage' if each == 1 else 'two stages'} on each rank, and {total} on {found} are not: "
            + (f"make {each * found} stages, or use Interleaved1F1B" if each == 1 else f"make {each * found} stages")
        )


def stages_of(rank: int, ranks: int, stages: int, mode: str) -> list[int]:
    """Round and round: rank, rank + ranks ...; back and forth: the n-th from the start and the n-th from the end."""
    if mode in _BACK_AND_FORTH and ranks > 1:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, ranks))


def rank_of(stage: int, ranks: int, stages: int, mode: str) -> int:
    return next(r for r in range(ranks) if stage in stages_of(r, ranks, stages, mode))


def least(mode: str, ranks: int, stages: int) -> tuple[int, int]:
    """How many micro-batches there must be at least, and of what their number must be a multiple."""
    if mode == "1F1B":
        return stages, 1
    if mode in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return ranks, ranks
    if mode == "DualPipeV":
        return stages, 1
    return 1, 1
