"""Where to cut so that the stages take equally long: the modules are timed, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from fleetx.errors import StrategyError
from fleetx.memory.trace import Step
from fleetx.moment import Batch, Moment
from fleetx.recompute import probe
from fleetx.recompute.solver import Block


def starts(moment: Moment, batch: Batch, stages: int) -> list[str]:
    """The modules with which the stages after the first begin."""
    args, kwargs = batch.arguments
    parts = [part for part in moment.plan.parts if part.local]
    step = Step(
        moment.model, moment.optimizer, args=args, kwargs=kwargs, loss=batch.loss_fn, targets=batch.target, parts=parts
    )
    blocks = probe.probes(step)[0].blocks
    allowed = [i for i in range(1, len(blocks)) if _cuttable(blocks, i)]
    if len(allowed) < stages - 1:
        raise StrategyError(
            f"pipeline: the model can be cut into {len(allowed) + 1} pieces at most, and {stages} stages were asked "
            "for: use fewer ranks, or say with `stages` or device_guard where they begin"
        )
    times = [block.forward + block.backward for block in blocks]
    sizes = [float(block.saved + block.takes) for block in blocks]
    return [blocks[i].name for i in partition(times, sizes, stages, allowed)]


def _cuttable(blocks: Sequence[Block], start: int) -> bool:
    """Is whatever later blocks read of earlier ones handed to this one too? And does no code between use it?"""
    handed = {number for _, number, _ in blocks[start].reads}
    later = blocks[start + 1 :]
    return not any(block.loose for block in later) and all(
        maker >= start or number in handed for block in later for maker, number, _ in block.reads
    )


def partition(times: Sequence[float], sizes: Sequence[float], stages: int, allowed: Sequence[int]) -> list[int]:
    """Where the pieces after the first begin, so that the longest takes least; then, that the largest is smallest."""
    count = len(times)

    def cost(low: int, high: int) -> tuple[float, float]:
        return sum(times[low:high]), sum(sizes[low:high])

    @cache
    def best(low: int, pieces: int) -> tuple[tuple[float, float], tuple[int, ...]] | None:
        if pieces == 1:
            return cost(low, count), ()
        found = []
        for high in allowed:
            if high > low and (rest := best(high, pieces - 1)) is not None:
                (time, size), ends = rest
                mine = cost(low, high)
                found.append(((max(mine[0], time), max(mine[1], size)), (high, *ends)))
        return min(found, default=None)

    chosen = best(0, stages)
    assert chosen is not None
    return list(chosen[1])
