"""Let auto choose the strategy: it measures, predicts, tries, explains, and writes its choice to strategy.yaml.

    fleetrun --device cpu --nproc_per_node 2 examples/auto.py
    fleetrun --device cpu --nproc_per_node 2 examples/auto.py --strategy strategy.yaml   # repeat it without a search
    fleetx plan examples/auto.py --nproc_per_node 2                                      # only the search

The data are the digits of scikit-learn.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fleetx as X
from fleetx import fleet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", help="a YAML file to load instead of searching")
    parser.add_argument("--global-batch", type=int, default=256, help="samples per update (default: 256)")
    parser.add_argument("--epochs", type=int, default=15)
    args = parser.parse_args()

    fleet.init(is_collective=True)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 16, 256), nn.ReLU(), nn.Linear(256, 10),
    ).to(fleet.device())  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    if args.strategy:
        strategy, sample = fleet.DistributedStrategy.load(args.strategy), None
    else:
        strategy = fleet.DistributedStrategy()
        strategy.auto = True
        strategy.auto_configs = {"global_batch": args.global_batch, "max_seconds": 40, "output": "strategy.yaml"}
        sample = on_device(next(iter(X.data.load_digits(batch_size=args.global_batch // fleet.worker_num()))))
    model, optimizer = fleet.distribute(model, optimizer, strategy, sample=sample, loss_fn=cross_entropy)

    loader = X.data.load_digits(batch_size=fleet.batch().feed, drop_last=True)
    for epoch in range(args.epochs):
        for batch in loader:
            loss = fleet.forward_backward(*on_device(batch), loss_fn=cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        fleet.flush()
        if fleet.is_first_worker():
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)


def on_device(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return batch["image"].to(fleet.device()), batch["label"].flatten().to(fleet.device())


if __name__ == "__main__":
    main()
