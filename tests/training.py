"""A small network, its data, and the loops that people write: what most tests train."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fleetx import fleet

Batch = tuple[Tensor, Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


class Lazy(nn.Module):
    """Has a layer that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = net(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def batches(n: int = 8, size: int = 4) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 6, generator=g), torch.randn(size, 3, generator=g)) for _ in range(n)]


def big(data: Sequence[Batch], k: int) -> list[Batch]:
    """Every k batches as one."""
    return [
        (torch.cat([x for x, _ in data[i : i + k]]), torch.cat([y for _, y in data[i : i + k]]))
        for i in range(0, len(data), k)
    ]


def share(data: Sequence[Batch], rank: int, size: int) -> list[Batch]:
    """This rank's share of every batch."""
    return [(x.chunk(size)[rank], y.chunk(size)[rank]) for x, y in data]


def zero_last(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def zero_first(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()


def zero_middle(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss = mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def with_fleet_backward(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """As parts need it that follow the loss."""
    fleet.backward(mse_loss(model(x), y), optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad()


LOOPS = [zero_last, zero_first, zero_middle]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(
    data: Sequence[Batch],
    *,
    make: Callable[[], nn.Module] = net,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    loop: Callable[..., None] = zero_last,
) -> dict[str, Tensor]:
    """Plain PyTorch: what everything is compared with."""
    model = make()
    o = optimizer(model)
    for x, y in data:
        loop(model, o, x, y)
    return weights(model)


def train_fleet(
    data: Sequence[Batch],
    declared: dict[str, Any],
    *,
    make: Callable[[], nn.Module] = net,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    loop: Callable[..., None] = zero_last,
) -> dict[str, Tensor]:
    """The same under a strategy; each rank takes its share of every batch."""
    fleet.init()
    model = make()
    model, o = fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))
    for x, y in share(data, fleet.worker_index(), fleet.worker_num()):
        loop(model, o, x, y)
    return weights(model)


def resumes(declared: dict[str, Any], optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd) -> bool:
    """Does a run that stops after six of ten steps and resumes from a file of plain data equal the unbroken run?"""

    def build() -> Any:
        fleet.init()
        model = net()
        return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))

    model, o = build()
    data = share(batches(10), fleet.worker_index(), fleet.worker_num())
    for i, (x, y) in enumerate(data):
        with_fleet_backward(model, o, x, y)
        if i == 5:
            file = io.BytesIO()
            torch.save([model.state_dict(), o.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, o2 = build()
    again.load_state_dict(saved[0])
    o2.load_state_dict(saved[1])
    for x, y in data[6:]:
        with_fleet_backward(again, o2, x, y)
    return all(map(torch.equal, weights(model).values(), weights(again).values()))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit for bit."""
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
