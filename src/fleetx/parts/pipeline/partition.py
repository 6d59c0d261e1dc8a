"""Where to cut a model so that its stages take equally long; the modules are timed one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from fleetx.engine.context import Context, StepInput
from fleetx.errors import StrategyError
from fleetx.measure.fake_step import TrainingStep
from fleetx.parts.pipeline.cut_points import find_cut_points


def balanced_starts(ctx: Context, batch: StepInput, stages: int) -> list[str]:
    """The first modules of all stages but the first."""
    args, kwargs = batch.arguments
    step = TrainingStep(
        ctx.model, ctx.optimizer, args, kwargs, batch.loss_fn, batch.target,
        parts=[part for part in ctx.plan.parts if part.changes_forward],
    )  # fmt: skip
    profile, starts = find_cut_points(step)
    if len(starts) < stages - 1:
        raise StrategyError(
            f"pipeline: the model can be cut into at most {len(starts) + 1} stages, not {stages}: use fewer ranks, or "
            "set pipeline_configs['stages'] or use device_guard"
        )
    times = [block.forward + block.backward for block in profile.blocks]
    sizes = [float(block.saved + block.input_saved) for block in profile.blocks]
    return [starts[i] for i in partition(times, sizes, stages, list(starts))]


def partition(times: Sequence[float], sizes: Sequence[float], stages: int, allowed: Sequence[int]) -> list[int]:
    """Where all stages but the first begin. Minimizes the longest stage, then the largest."""
    count = len(times)

    def cost(low: int, high: int) -> tuple[float, float]:
        return sum(times[low:high]), sum(sizes[low:high])

    @cache
    def best(low: int, stages: int) -> tuple[tuple[float, float], tuple[int, ...]] | None:
        if stages == 1:
            return cost(low, count), ()
        options = []
        for high in allowed:
            if high > low and (rest := best(high, stages - 1)) is not None:
                (time, size), ends = rest
                mine = cost(low, high)
                options.append(((max(mine[0], time), max(mine[1], size)), (high, *ends)))
        return min(options, default=None)

    chosen = best(0, stages)
    assert chosen is not None
    return list(chosen[1])
