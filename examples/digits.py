"""Train a small ResNet on handwritten digits with several strategies at once.

    fleetrun --device cpu --nproc_per_node 2 examples/digits.py
    fleetrun --device cpu --nproc_per_node 2 examples/digits.py --strategy my.yaml --epochs 5
    fleetrun --device cpu --nproc_per_node 2 --max_restarts 3 examples/digits.py --checkpoints run  # resumes by itself
    fleetrun --device cpu --nproc_per_node 2 examples/digits.py --record runs/digits && fleetx report runs/digits
    python examples/digits.py                                  # one process, no launcher

The data are the 1,797 images of 8 x 8 pixels that come with scikit-learn; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fleetx import fleet
from fleetx.data import Loader, load_digits


class Block(nn.Module):
    """Two 3 x 3 convolutions with a shortcut."""

    def __init__(self, channels: int, out_channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Conv2d(channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.blocks = nn.Sequential(Block(32, 32, 1), Block(32, 64, 2), Block(64, 128, 2))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def default_strategy(*, recompute: bool) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.recompute = recompute  # what is recomputed is not compiled
    strategy.recompute_configs = {"checkpoints": ["blocks.*"]}
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 2}
    strategy.sync_batch_norm = True
    strategy.clip = True
    strategy.clip_configs = {"clip_norm": 5.0}
    return strategy


def on(device: torch.device, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return batch["image"].to(device), batch["label"].to(device).flatten()


@torch.no_grad()
def accuracy(model: nn.Module, test: Loader, device: torch.device) -> float:
    """Accuracy on the test set: each worker evaluates its share, and the counts are summed."""
    model.eval()
    right, total = torch.zeros((), dtype=torch.int64, device=device), 0
    for batch in test:
        x, y = on(device, batch)
        right += (model(x).argmax(1) == y).sum()
        total += len(y)
    model.train()
    right, total = fleet.metrics.sum((right, total))
    return (right / total).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="samples per worker and step (default: 32)")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--strategy", help="a YAML file to use instead of the strategy in this script")
    parser.add_argument("--checkpoints", help="a folder to save to and to resume from")
    parser.add_argument("--record", help="a folder for what happens, of which `fleetx report` makes a page")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile, do not recompute")
    args = parser.parse_args()

    fleet.init(is_collective=True)
    if args.record:
        fleet.record(args.record, predict_memory=True)
    mine = args.strategy
    strategy = fleet.DistributedStrategy.load(mine) if mine else default_strategy(recompute=not args.compile)
    torch.manual_seed(0)
    device = fleet.device()
    loader = load_digits(args.batch, drop_last=True)
    test = load_digits(256, "val")

    model = ResNet().to(device)
    if args.compile and strategy.recompute:
        parser.error("--compile: what is recomputed is not compiled, so turn recompute off in the strategy")
    if args.compile:
        model.compile(backend=args.compile)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    if fleet.is_first_worker():
        print(fleet.explain())

    total = args.epochs * len(loader)
    steps = range(total)
    if args.checkpoints:
        steps = fleet.checkpoints(args.checkpoints, every=50, loader=loader, scheduler=scheduler, steps=total)
        if fleet.is_first_worker() and steps.resumed:
            print(f"resumed after step {steps.step} of {total}; to start again, remove the folder {args.checkpoints}")
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
    for step in fleet.progress(steps):
        x, y = on(device, next(batches))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % len(loader) == 0:
            fleet.flush()  # the last merge of an epoch may have fewer steps
            scheduler.step()
            found = accuracy(model, test, device)
            fleet.log(accuracy=found)
            if fleet.is_first_worker():
                epoch = (step + 1) // len(loader)
                print(f"epoch {epoch:2d}  loss {loss.item():.4f}  test accuracy {found:.2%}", flush=True)


if __name__ == "__main__":
    main()
