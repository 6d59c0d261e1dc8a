"""Where to cut so that the stages take equally long: the modules are timed, one at a time."""

from __future__ import annotations

from fleetx.engine.context import Context, StepInput
from fleetx.errors import StrategyError
from fleetx.measure.fake_step import Step
from fleetx.parts.pipeline.cut_points import pieces
from fleetx.parts.pipeline.partition import partition


def starts(ctx: Context, batch: StepInput, stages: int) -> list[str]:
    """The modules with which the stages after the first begin."""
    args, kwargs = batch.arguments
    parts = [part for part in ctx.plan.parts if part.changes_forward]
    step = Step(
        ctx.model, ctx.optimizer, args=args, kwargs=kwargs, loss=batch.loss_fn, targets=batch.target, parts=parts
    )
    found, allowed = pieces(step)
    blocks = found.blocks
    if len(allowed) < stages - 1:
        raise StrategyError(
            f"pipeline: the model can be cut into {len(allowed) + 1} pieces at most, and {stages} stages were asked "
            "for: use fewer ranks, or say with `stages` or device_guard where they begin"
        )
    times = [block.forward + block.backward for block in blocks]
    sizes = [float(block.saved + block.takes) for block in blocks]
    return [allowed[i] for i in partition(times, sizes, stages, list(allowed))]
