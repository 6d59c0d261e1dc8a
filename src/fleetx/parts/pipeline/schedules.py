"""The schedules by name, and how many stages, ranks and micro-batches each supports. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

SINGLE, ANY, TWO = 1, 0, 2  # stages per rank
# By Paddle's and torch's names: torch's class, and stages per rank.
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
    """Stages per rank, unless the user sets them."""
    return MODES[mode][1] or 2


def ranks(stages: int | None, degree: int | None, mode: str, world: int) -> int:
    """Ranks per pipeline."""
    if degree is not None:
        return degree
    return max(1, stages // per_rank(mode)) if stages is not None else world


def problems(stages: int | None, degree: int | None, mode: str, world: int) -> Iterator[str]:
    needed, each = ranks(stages, degree, mode, world), MODES[mode][1]
    total = stages if stages is not None else needed * per_rank(mode)
    if needed > world:
        most = world * per_rank(mode)
        yield (
            f"pipeline: {total} stages need {needed} ranks, but this run has {world}: start {needed} workers, or make "
            f"{most} stage{'s' if most > 1 else ''}"
        )
    elif world % needed:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        near = sorted(sorted(divisors, key=lambda n: abs(n - needed))[:2])
        yield (
            f"pipeline: {world} ranks cannot be divided into pipelines of {needed}: use pipelines of "
            f"{' or '.join(map(str, near))}, or start {world - world % needed} or "
            f"{world - world % needed + needed} workers"
        )
    if total < needed or total % needed:
        yield (
            f"pipeline: {total} stages cannot be divided evenly among {needed} ranks: make {needed} or {2 * needed} "
            "stages"
        )
    elif each and total != each * needed and needed > 1:
        other = ", or use Interleaved1F1B" if each == 1 else ""
        yield (
            f"pipeline: {mode} needs {'one stage' if each == 1 else 'two stages'} per rank, but there are {total} on "
            f"{needed} ranks: make {each * needed} stages{other}"
        )


def stages_of(rank: int, ranks: int, stages: int, mode: str) -> list[int]:
    """Round robin (rank, rank + ranks, ...), or back and forth: the n-th from the start and the n-th from the end."""
    if mode in _BACK_AND_FORTH and ranks > 1:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, ranks))


def rank_of(stage: int, ranks: int, stages: int, mode: str) -> int:
    return next(r for r in range(ranks) if stage in stages_of(r, ranks, stages, mode))


def least(mode: str, ranks: int, stages: int) -> tuple[int, int]:
    """The minimum number of micro-batches, and what the number must be a multiple of."""
    if ranks == 1:
        return 1, 1
    if mode in ("1F1B", "DualPipeV"):
        return stages, 1
    if mode in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return ranks, ranks
    return 1, 1
