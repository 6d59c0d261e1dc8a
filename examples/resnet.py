"""Train ResNet on an ImageNet-style folder with techniques for large batches: LARS, gradient merge, SyncBatchNorm.

    fleetrun --device cpu --nproc_per_node 2 examples/resnet.py
    fleetrun examples/resnet.py --data ILSVRC2012 --side 224 --classes 1000 --layers 3,4,6,3 --hidden 64 --batch 128

Without --data, handwritten digits are written to ./example_data/digits32 and used.
"""

from __future__ import annotations

import argparse

import prepared
import torch

import fleetx as X
from fleetx import fleet
from fleetx.optim.schedule import large_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder with train.txt, val.txt and the images they list")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="images per worker and step (default: 16)")
    parser.add_argument("--merge", type=int, default=2, help="steps per update (default: 2)")
    parser.add_argument("--rate", type=float, default=10.0, help="peak learning rate (default: 10)")
    parser.add_argument("--side", type=int, default=32, help="image size in pixels (default: 32)")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--layers", default="1,1,1", help="blocks per stage (default: 1,1,1)")
    parser.add_argument("--hidden", type=int, default=16, help="channels of the stem (default: 16)")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="use torch.compile")
    args = parser.parse_args()

    fleet.init(is_collective=True)
    torch.manual_seed(0)
    layers = [int(number) for number in args.layers.split(",")]
    model = X.applications.Resnet50(
        layers=layers, hidden=args.hidden, image_size=args.side, num_classes=args.classes
    ).to(fleet.device())
    if args.compile:
        model.compile(backend=args.compile)
    data = args.data or prepared.digits("example_data/digits", args.side)
    train = model.get_train_dataloader(data, batch_size=args.batch, drop_last=True)
    val = model.get_val_dataloader(data, batch_size=args.batch, shard=True)

    strategy = fleet.DistributedStrategy()
    strategy.lars = True
    strategy.lars_configs = {"lars_weight_decay": 1e-4, "exclude_from_weight_decay": ["normalization", "bias"]}
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": args.merge}
    strategy.sync_batch_norm = True
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate, momentum=0.9)
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    updates = args.epochs * -(-len(train) // args.merge)
    schedule = large_batch(optimizer, updates=updates, warmup=0.1, by="updates")

    trainer = X.MultiGPUTrainer()
    for epoch in range(args.epochs):
        for batch in train:
            loss = model(**{name: tensor.to(fleet.device()) for name, tensor in batch.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if fleet.flush():  # the last merge of an epoch may have fewer steps
            schedule.step()
        trainer.val(model, val, ["loss", "acc1", "acc5"], current_epoch=epoch)


if __name__ == "__main__":
    main()
