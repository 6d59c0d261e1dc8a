"""Train a small ResNet on handwritten digits with several strategies at once.

    fleetrun --device cpu --nproc_per_node 2 examples/digits.py
    fleetrun --device cpu --nproc_per_node 2 examples/digits.py --strategy my.yaml --epochs 5
    python examples/digits.py                                  # one process, no launcher

The data are the 1,797 images of 8 x 8 pixels that come with scikit-learn; nothing is downloaded.
"""

from __future__ import annotations

import argparse

import prepared
import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleetx import fleet


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


def data() -> tuple[TensorDataset, TensorDataset]:
    digits = prepared.sklearn_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    y = torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:1500], order[1500:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def default_strategy() -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.recompute = True
    strategy.recompute_configs = {"checkpoints": ["blocks.*"]}
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 2}
    strategy.sync_batch_norm = True
    strategy.clip = True
    strategy.clip_configs = {"clip_norm": 5.0}
    return strategy


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    """Accuracy on the test set: each worker evaluates its share, and the counts are summed."""
    model.eval()
    x, y = (t[fleet.worker_index() :: fleet.worker_num()].to(device) for t in test.tensors)
    correct = torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y), device=device)])
    if fleet.worker_num() > 1:
        dist.all_reduce(correct)
    model.train()
    return (correct[0] / correct[1]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="samples per worker and step (default: 32)")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--strategy", help="a YAML file to use instead of the strategy in this script")
    args = parser.parse_args()

    fleet.init(is_collective=True)
    strategy = fleet.DistributedStrategy.load(args.strategy) if args.strategy else default_strategy()
    torch.manual_seed(0)
    device = fleet.device()
    train, test = data()
    sampler = DistributedSampler(train, fleet.worker_num(), fleet.worker_index(), drop_last=True)
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)

    model = ResNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    if fleet.is_first_worker():
        print(fleet.explain())

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, disable=not fleet.is_first_worker()) as progress:
        bar = progress.add_task("training", total=args.epochs * len(loader))
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = cross_entropy(model(x.to(device)), y.to(device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                progress.update(bar, advance=1, description=f"epoch {epoch + 1} loss {loss.item():.3f}")
            fleet.flush()  # the last merge of an epoch may have fewer steps
            scheduler.step()
            test_accuracy = accuracy(model, test, device)
            if fleet.is_first_worker():
                progress.console.print(
                    f"epoch {epoch + 1:2d}  loss {loss.item():.4f}  test accuracy {test_accuracy:.2%}"
                )


if __name__ == "__main__":
    main()
