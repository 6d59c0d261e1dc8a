"""One training run on the ranks of a pool, under a strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer

from fleetx import fleet
from fleetx.comm.session import current, reset
from fleetx.errors import StrategyError
from fleetx.strategy import DistributedStrategy
from fleetx.verify import oracle
from fleetx.verify.observe import Observer
from fleetx.verify.oracle_updates import SwitchSettings

STEPS = 6  # at least
SAMPLES, WIDTH = 16, 128  # a weight of 128 * 128 elements is large enough for dgc
LR = 0.05


class Stack(nn.Sequential):
    """Verify's own model, in which every strategy has something to act on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, WIDTH, bias=False)  # the norm would cancel a bias, whose gradient would be noise
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 4)


def steps_for(settings: SwitchSettings) -> int:
    """The first two, which are not observed, and two periods: a code between averages only acts at the end of one."""
    period = settings.get("gradient_merge", {}).get("k_steps", 1)
    if "localsgd" in settings:
        period *= settings["localsgd"]["k_steps"]
    if "adaptive_localsgd" in settings:
        period *= settings["adaptive_localsgd"]["init_k_steps"] + 1  # it may grow
    return int(max(STEPS, 2 + 2 * period))


def batches(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SAMPLES, 8, generator=generator), torch.randn(SAMPLES, 4, generator=generator))
        for _ in range(steps)
    ]


def optimizer_for(model: nn.Module, switches: Sequence[str]) -> Optimizer:
    if {"lamb", "muon"} & set(switches):
        return Adam(model.parameters(), lr=LR)
    return SGD(model.parameters(), lr=LR, momentum=0.9)


def run(declared: Mapping[str, Any], switches: Sequence[str], dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """Train verify's own model."""
    return train(Stack(), batches(steps), mse_loss, declared, switches, dtype)


def train(
    model: nn.Module,
    data: Sequence[tuple[Tensor, Tensor]],
    loss_fn: oracle.SampleLoss,
    declared: Mapping[str, Any],
    switches: Sequence[str],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Train on this rank's share of the data. Returns what was counted, and the final state of the model.

    If `fleet.distribute` rejects the strategy, returns {"refused": its problems}. Every other error is raised.
    """
    reset()
    fleet.init()
    model = model.to(fleet.device(), dtype)
    try:
        model, optimizer = fleet.distribute(model, optimizer_for(model, switches), DistributedStrategy(**declared))
    except StrategyError as error:
        return {"refused": error.problems}
    engine = current().find(model)
    replicas = engine.layout.replica_group
    averaged = fleet.averaged if "ema" in declared else None
    measured = (lambda: engine.state["NoiseScale"]["count"]) if "noise_scale" in declared else None
    observer = Observer(model, optimizer, replicas.device, averaged, measured)
    scheduled = "pipeline" in declared
    with observer.observing():
        for batch in data:
            x, y = (t.chunk(replicas.size)[replicas.rank].to(replicas.device) for t in batch)
            x, y = (t.to(dtype) if t.is_floating_point() else t for t in (x, y))
            observer.before()
            if scheduled:
                fleet.forward_backward(x, y, loss_fn=loss_fn)
            else:
                fleet.backward(loss_fn(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            observer.after()
    state = {name: whole(t).double().cpu() for name, t in model.state_dict().items()}
    if averaged is not None:
        names = [name for name, _ in model.named_parameters() if name in state]
        with averaged():
            now = model.state_dict()
            state |= {oracle.AVERAGED + name: whole(now[name]).double().cpu().clone() for name in names}
    return {
        "state": state,
        "steps": observer.steps,
        "share": replicas.rank,
        "replica": engine.layout.replicas.rank,
        "shard": engine.layout.shard,
        "inside": engine.network.inside,
    }


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
