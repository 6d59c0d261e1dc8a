"""What to do where the network is slow: the same training, and what it sends.

    fleetrun --device cpu --nproc_per_node 2 examples/slow_network.py                          # each in turn
    fleetrun --device cpu --nproc_per_node 2 examples/slow_network.py --only dgc,localsgd --epochs 8

The data are the digits inside of scikit-learn. How long these take on a slow link is in docs/results/slow_network.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import fleetx as X
from fleetx import fleet

WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "fp16_allreduce": {"fp16_allreduce": True},
    "dgc": {"dgc": {"sparsity": [0.75, 0.9375, 0.984, 0.996, 0.999], "rampup_step": 60}},
    "localsgd": {"localsgd": {"k_steps": 8}},
    "adaptive_localsgd": {"adaptive_localsgd": {"init_k_steps": 2}},
    "merged": {"gradient_merge": {"k_steps": 4}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(WAYS), help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in WAYS]:
        parser.error(f"there is no {unknown[0]!r}: choose some of {', '.join(WAYS)}")

    fleet.init(is_collective=True)
    if fleet.is_first_worker():
        print(f"{'':20}{'MB sent':>10}{'accuracy':>10}", flush=True)
    for name in names:
        right, sent = train(WAYS[name], args.epochs)
        if fleet.is_first_worker():
            print(f"{name:20}{sent / 1e6:10.1f}{right:10.1%}", flush=True)


def train(settings: dict[str, object], epochs: int) -> tuple[float, int]:
    """The accuracy of this worker's model, and the bytes that passed through the loopback interface meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    ).to(fleet.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**settings))
    loader = X.data.load_digits(batch_size=32, drop_last=True)
    fleet.barrier_worker()
    before = on_loopback()
    for _ in range(epochs):
        for batch in loader:
            logits = model(batch["image"].to(fleet.device()))
            loss = nn.functional.cross_entropy(logits, batch["label"].flatten().to(fleet.device()))
            fleet.backward(loss)  # as loss.backward(); adaptive_localsgd follows the loss, and sees it so
            optimizer.step()
            optimizer.zero_grad()
    fleet.flush()  # the last window of merged steps may be short
    fleet.barrier_worker()
    sent = on_loopback() - before
    model.eval()
    with torch.no_grad():  # every worker looks at all that was held out
        pairs = [(model(b["image"].to(fleet.device())).cpu().argmax(1), b["label"].flatten())
                 for b in X.data.load_digits(batch_size=64, phase="val", shard=False)]  # fmt: skip
    hits = torch.cat([guess == label for guess, label in pairs])
    return hits.float().mean().item(), sent


def on_loopback() -> int:
    """Bytes that have passed through the interface by which processes of one machine talk. Linux only."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


if __name__ == "__main__":
    main()
