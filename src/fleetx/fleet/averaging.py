"""`fleet.averaged`: the average that `ema` keeps, in place of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fleetx.comm import peers
from fleetx.comm.session import current
from fleetx.engine.engine import Engine
from fleetx.errors import UsageError
from fleetx.parts.ema import EMA


@contextmanager
def averaged(*, model: nn.Module | None = None) -> Iterator[None]:
    """`with fleet.averaged():` evaluate or export the average that `strategy.ema` keeps.

    Inside, the model's parameters have the values of the average. Afterwards, parameters and buffers have their own
    values again, bit for bit, whatever the body did. Training, saving and loading inside raise `UsageError`. Under
    `localsgd` the average is the mean over the ranks, and every worker must enter; otherwise one worker can enter
    alone, unless the model itself is divided between workers.
    """
    engine: Engine = current().find(model)
    part = next((p for p in engine.plan.parts if isinstance(p, EMA)), None)
    if part is None:
        raise UsageError("fleet.averaged() needs an average of the parameters: turn strategy.ema on")
    ctx = engine.context_of(part)
    with engine.lend("fleet.averaged()"):
        if ctx.apart:
            peers.meet("fleet.averaged")
        with part.averaged(ctx):
            yield
