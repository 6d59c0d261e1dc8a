"""Where to cut so that the stages take equally long: the modules are timed, one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from fleetx.errors import StrategyError
from fleetx.memory.trace import Step
from fleetx.moment import Batch, Moment
from fleetx.pipeline.partition import partition
from fleetx.recompute import probe
from fleetx.recompute.solver import Block


def starts(moment: Moment, batch: Batch, stages: int) -> list[str]:
    """The modules with which the stages after the first begin."""
    args, kwargs = batch.arguments
    parts = [part for part in moment.plan.parts if part.local]
    step = Step(
        moment.model, moment.optimizer, args=args, kwargs=kwargs, loss=batch.loss_fn, targets=batch.target, parts=parts
    )
    (coarse,) = probe.probes(step, fine=False)
    blocks = coarse.blocks
    allowed = [i for i in range(1, len(blocks)) if cuttable(blocks, i)]
    if len(allowed) < stages - 1:
        raise StrategyError(
            f"pipeline: the model can be cut into {len(allowed) + 1} pieces at most, and {stages} stages were asked "
            "for: use fewer ranks, or say with `stages` or device_guard where they begin"
        )
    times = [block.forward + block.backward for block in blocks]
    sizes = [float(block.saved + block.takes) for block in blocks]
    return [blocks[i].name for i in partition(times, sizes, stages, allowed)]


def cuttable(blocks: Sequence[Block], start: int) -> bool:
    """Is whatever later blocks read of earlier ones handed to this one too? And does no code between use it?"""
    handed = {number for _, number, _ in blocks[start].reads}
    later = blocks[start + 1 :]
    return not any(block.loose for block in later) and all(
        maker >= start or number in handed for block in later for maker, number, _ in block.reads
    )
