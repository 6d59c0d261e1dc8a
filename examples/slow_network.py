"""Strategies for slow networks: train the same model with each, and compare the bytes sent.

    fleetrun --device cpu --nproc_per_node 2 examples/slow_network.py                          # all strategies
    fleetrun --device cpu --nproc_per_node 2 examples/slow_network.py --only dgc,localsgd --epochs 8

The data are scikit-learn's digits. docs/results/slow_network.md shows how long these take on a slow link.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import fleetx as X
from fleetx import fleet

STRATEGIES: dict[str, dict[str, object]] = {
    "plain": {},
    "fp16_allreduce": {"fp16_allreduce": True},
    "dgc": {"dgc": {"sparsity": [0.75, 0.9375, 0.984, 0.996, 0.999], "rampup_step": 60}},
    "localsgd": {"localsgd": {"k_steps": 8}},
    "adaptive_localsgd": {"adaptive_localsgd": {"init_k_steps": 2}},
    "merged": {"gradient_merge": {"k_steps": 4}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default=",".join(STRATEGIES), help=f"comma-separated list from {', '.join(STRATEGIES)}"
    )
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="use torch.compile")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in STRATEGIES]:
        parser.error(f"unknown strategy {unknown[0]!r}: choose from {', '.join(STRATEGIES)}")

    fleet.init(is_collective=True)
    if fleet.is_first_worker():
        print(f"{'':20}{'MB sent':>10}{'accuracy':>10}", flush=True)
    for name in names:
        accuracy, sent = train(STRATEGIES[name], args.epochs, args.compile)
        if fleet.is_first_worker():
            print(f"{name:20}{sent / 1e6:10.1f}{accuracy:10.1%}", flush=True)


def train(settings: dict[str, object], epochs: int, backend: str | None) -> tuple[float, int]:
    """Return the accuracy of this worker's model, and the bytes sent over the loopback interface."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    ).to(fleet.device())
    if backend:
        model.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**settings))
    loader = X.data.load_digits(batch_size=32, drop_last=True)
    fleet.barrier_worker()
    before = loopback_bytes()
    for _ in range(epochs):
        for batch in loader:
            logits = model(batch["image"].to(fleet.device()))
            loss = nn.functional.cross_entropy(logits, batch["label"].flatten().to(fleet.device()))
            fleet.backward(loss)  # like loss.backward(), but adaptive_localsgd needs to see the loss
            optimizer.step()
            optimizer.zero_grad()
    fleet.flush()  # applies an incomplete window of merged steps
    fleet.barrier_worker()
    sent = loopback_bytes() - before
    model.eval()
    with torch.no_grad():  # every worker evaluates the full held-out set
        pairs = [(model(b["image"].to(fleet.device())).cpu().argmax(1), b["label"].flatten())
                 for b in X.data.load_digits(batch_size=64, phase="val", shard=False)]  # fmt: skip
    hits = torch.cat([guess == label for guess, label in pairs])
    return hits.float().mean().item(), sent


def loopback_bytes() -> int:
    """Bytes sent over the loopback interface so far. Linux only."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


if __name__ == "__main__":
    main()
