"""Train a convolutional network on your own images: a folder per class.

    fleetrun --device cpu --nproc_per_node 2 examples/image_folder.py && fleetx report runs/images
    fleetrun examples/image_folder.py --data flowers --size 64 --batch 64      # flowers/train/rose/1.jpg ...

Without --data, handwritten digits are written to ./example_data/digit_folders and used. --output gets checkpoints, the
record of the run and the trained model. The same command resumes a run that was interrupted.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy
import prepared
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d
from torch.utils.data import Dataset

from fleetx import fleet
from fleetx.schedule import large_batch


class Images(Dataset):
    """folder/CLASS/FILE as (image, number of the class); for training, each image is shifted at random."""

    def __init__(self, folder: Path, size: int, *, train: bool):
        self.size, self.train, self.image = size, train, prepared.needed("PIL.Image", "pillow")
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [(f, label) for label, name in enumerate(self.classes) for f in sorted((folder / name).iterdir())]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        path, label = self.files[number]
        pixels = numpy.array(self.image.open(path).convert("RGB").resize((self.size, self.size)))
        image = torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1
        if self.train:
            image = image.roll(torch.randint(-2, 3, (2,)).tolist(), (1, 2))
        return image, label


class Block(nn.Module):
    """Not a Sequential: torch.compile cannot go on in the middle of its loop, after a BatchNorm that communicates."""

    def __init__(self, channels: int, out: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return max_pool2d(torch.relu(self.norm(self.conv(x))), 2)


def network(classes: int) -> nn.Module:
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(Block(3, 32), Block(32, 64), Block(64, 128), pool, nn.Linear(128, classes))


@torch.no_grad()
def accuracy(model: nn.Module, loader: object) -> float:
    """Of the averaged parameters. Each worker evaluates its share."""
    model.eval()
    with fleet.averaged():
        right = [((model(x).argmax(1) == y).sum(), len(y)) for x, y in loader]
    model.train()
    found, total = fleet.metrics.sum([sum(column) for column in zip(*right, strict=True)])
    return float(found / total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with train/CLASS/* and val/CLASS/*")
    parser.add_argument("--output", type=Path, default=Path("runs/images"), help="(default: runs/images)")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32, help="images per worker and step (default: 32)")
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate (default: 0.1)")
    parser.add_argument("--size", type=int, default=32, help="of the images, in pixels (default: 32)")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="use torch.compile")
    args = parser.parse_args()

    fleet.init()
    fleet.record(args.output, predict_memory=True)
    torch.manual_seed(0)
    data, device = args.data or prepared.digit_folders("example_data/digit_folders"), fleet.device()
    images = Images(data / "train", args.size, train=True)
    train = fleet.loader(images, args.batch, drop_last=True, device=device)
    val = fleet.loader(Images(data / "val", args.size, train=False), 256, shuffle=False, device=device)

    model = network(len(images.classes)).to(device)
    if args.compile:
        model.compile(backend=args.compile)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    strategy = fleet.DistributedStrategy(sync_batch_norm=True, clip={"clip_norm": 5.0}, ema={"decay": 0.9})
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    total = args.epochs * len(train)
    schedule = large_batch(optimizer, updates=total, warmup=0.1, decay="cosine")

    steps = fleet.checkpoints(args.output / "checkpoints", every=100, steps=total, loader=train, scheduler=schedule)
    if steps.resumed and fleet.is_first_worker():
        print(f"resumed after step {steps.step} of {total}; to start again, remove the folder {args.output}")
    batches = itertools.chain.from_iterable(itertools.repeat(train))  # epoch after epoch
    for step in fleet.progress(steps):
        x, y = next(batches)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % len(train) == 0:
            found = accuracy(model, val)
            fleet.log(accuracy=found)
            if fleet.is_first_worker():
                print(f"epoch {(step + 1) // len(train)}: accuracy {found:.1%}", flush=True)
    fleet.export(args.output / "model", averaged=True)


if __name__ == "__main__":
    main()
