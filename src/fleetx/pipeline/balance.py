"""Where to cut so that the stages take equally long: the modules are timed, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from fleetx.errors import StrategyError
from fleetx.memory.trace import Step
from fleetx.moment import Batch, Moment
from fleetx.recompute import probe


def starts(moment: Moment, batch: Batch, stages: int) -> list[str]:
    """The modules with which the stages after the first begin."""
    args, kwargs = batch.arguments
    parts = [part for part in moment.plan.parts if part.local]
    step = Step(
        moment.model, moment.optimizer, args=args, kwargs=kwargs, loss=batch.loss_fn, targets=batch.target, parts=parts
    )
    blocks = probe.probes(step)[0].blocks
    if len(blocks) < stages:
        raise StrategyError(
            f"pipeline: the model can be cut into {len(blocks)} pieces at most, and {stages} stages were asked for: "
            "use fewer ranks, or say with `stages` or device_guard where they begin"
        )
    times = [block.forward + block.backward for block in blocks]
    sizes = [float(block.saved + block.takes) for block in blocks]
    return [blocks[i].name for i in partition(times, sizes, stages)]


def partition(times: Sequence[float], sizes: Sequence[float], stages: int) -> list[int]:
    """Where the pieces after the first begin, so that the longest takes least; then, that the largest is smallest."""
    count = len(times)

    def cost(low: int, high: int) -> tuple[float, float]:
        return sum(times[low:high]), sum(sizes[low:high])

    @cache
    def best(low: int, pieces: int) -> tuple[tuple[float, float], tuple[int, ...]]:
        if pieces == 1:
            return cost(low, count), ()
        found = []
        for high in range(low + 1, count - pieces + 2):
            (time, size), rest = best(high, pieces - 1)
            mine = cost(low, high)
            found.append(((max(mine[0], time), max(mine[1], size)), (high, *rest)))
        return min(found)

    return list(best(0, stages)[1])
