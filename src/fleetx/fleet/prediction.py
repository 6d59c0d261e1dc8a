"""Predicts the peak memory of a step, for the record of a run.

The prediction runs the user's forward once more, on tensors without data. On a CPU that happens in a forked child: what
the forward does to global variables or random numbers stays in the child, and the run waits for at most 30 seconds.
A process that uses CUDA cannot be forked, so there the prediction runs in this process, and only if asked for.
If it fails, the reason is recorded; it never stops a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import SGD

from fleetx.base.user_line import warn
from fleetx.comm.session import current
from fleetx.engine.dtensors import local
from fleetx.strategy.stage import Stage

if TYPE_CHECKING:
    from fleetx.engine.engine import Engine
    from fleetx.record.recorder import Recorder

Facts = dict[str, Any]
LIMIT = 30.0  # seconds that a run waits for a prediction that was not asked for
_ASKED = 3600.0  # the same, if it was asked for
_ON_CUDA = (
    "on CUDA, the peak of a step is predicted only if asked for, because it calls the model once more in this process: "
    "fleet.record(..., predict_memory=True)"
)


def arrange(recorder: Recorder, engine: Engine) -> None:
    """Have the memory of this training predicted at its first batch. Each pipeline rank predicts its own stages."""
    if recorder.predicts is False:
        recorder.ask(engine, lambda _: {"unpredicted": "fleet.record(..., predict_memory=False) turned it off"})
    elif recorder.predicts is None and recorder.world.device.type == "cuda":
        recorder.ask(engine, lambda _: {"unpredicted": _ON_CUDA})
    elif schedule := engine.plan.at(Stage.SCHEDULE):
        notes = engine.context_of(schedule[0].part).notes

        def tell(running: Callable[[bool], int]) -> None:
            recorder.foretell(engine, _told(recorder, engine, partial(_staged, engine, running)))

        notes["predict"] = tell
    elif recorder.world.rank == 0:
        recorder.ask(engine, lambda run: _told(recorder, run, partial(_peak, run)))


def _told(recorder: Recorder, engine: Engine, call: Callable[[], int]) -> Facts:
    """Make the prediction where it does no harm: in a child process, except on CUDA."""
    from fleetx.measure.child import Answer, forked

    if any(getattr(part, "memory_budget", None) is not None for part in engine.plan.parts):
        return {}  # this part makes its own prediction
    with _silence():
        if recorder.world.device.type == "cuda":
            try:
                answer = Answer(value=call())
            except Exception as error:
                answer = Answer(error=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        else:
            try:
                answer = forked(call, seconds=_ASKED if recorder.predicts else LIMIT)
            except OSError as error:  # no process, or no memory for one
                answer = Answer(error=f"no child process could be made: {error.strerror}")
    if not answer.error:
        return {"predicted": int(answer.value)}
    if recorder.predicts:
        warn(f"the memory of a step is not predicted: {answer.error}")
    return {"unpredicted": answer.error}


@contextmanager
def _silence() -> Iterator[None]:
    """What runs inside is not part of the training: hide it from the record and from the other ranks."""
    session = current()
    was = session.recorder, session.peers, session.inside
    session.recorder = session.peers = None
    try:
        yield
    finally:
        session.recorder, session.peers, session.inside = was


def _peak(engine: Engine) -> int:
    """The peak of a step with the batch that is about to enter the model."""
    from fleetx.measure.fake_step import TrainingStep, estimate
    from fleetx.parts.recompute import budget

    args, kwargs = engine.step.inputs
    group = engine.layout.shard_group
    # With FSDP there are no buckets, and `_with_update` counts the optimizer state that this rank holds.
    ranks = engine.layout.replica_group.size if group is None else 1
    optimizer = engine.optimizer if group is None else SGD(engine.model.parameters(), lr=0.0)
    step = TrainingStep.under(engine.plan, engine.model, optimizer, ranks=ranks, args=args, kwargs=kwargs)
    install = budget.install_for(next((part for part in engine.plan.parts if part.segments), None), step)
    if group is None:
        return estimate(step, install).peak
    from fleetx.parts.sharding import memory

    part: Any = next(part for part in engine.plan.parts if part.divides)
    names = engine.context_of(part).notes["segments"]
    above = memory.running(step, names, part, group.size, install)
    return _with_update(engine, above)


def _staged(engine: Engine, running: Callable[[bool], int]) -> int:
    """The peak of a step in a pipeline.

    running: predicts forward and backward on this rank, with parameters and gradients.
    """
    merged = bool(engine.plan.at(Stage.GATE))
    params = [p for p in engine.names if not p.is_meta]
    above = running(merged) - sum(p.nbytes for p in params)
    buckets = sum(p.nbytes for p in params if p.requires_grad) if engine.reducer is not None and merged else 0
    return _with_update(engine, above + buckets)


def _with_update(engine: Engine, running: int) -> int:
    """The peak of a step on a rank that holds only part of the model.

    running: bytes of forward and backward, without the parameters and what the optimizer and strategies keep.
    """
    from fleetx.measure.fake_step import update_bytes

    held = [local(p) for p in engine.names if not p.is_meta]
    whole = sum(p.nbytes for p in engine.names)
    mine = sum(p.nbytes for p in held)
    state, _, update = update_bytes(engine.optimizer)
    kept = sum(part.keeps(list(engine.names), engine.plan) for part in engine.plan.parts) * mine // max(whole, 1)
    return max(mine + state + running, update) + kept
