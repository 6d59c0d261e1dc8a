"""Train a small GPT on your own text files, byte by byte.

    fleetrun --device cpu --nproc_per_node 2 examples/language_model.py && fleetx report runs/language
    fleetrun examples/language_model.py --data my_notes --length 512 --width 384 --layers 6 --epochs 20

Without --data, the topics of Python's own help() are written to ./example_data/topics and used. --output gets
checkpoints, the record of the run and the trained model. The same command resumes a run that was interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

import prepared
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from fleetx import fleet
from fleetx.schedule import large_batch


class Pieces(Dataset):
    """Pieces of a text, as (bytes, the byte that follows each)."""

    def __init__(self, text: bytes, length: int):
        self.length, self.text = length, torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        piece = self.text[number * self.length : (number + 1) * self.length + 1].long()
        return piece[:-1], piece[1:]


class GPT(nn.Module):
    def __init__(self, length: int, width: int, layers: int):
        super().__init__()
        self.words, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        x = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def bits_per_byte(model: nn.Module, loader: object) -> float:
    """Each worker evaluates its share."""
    model.eval()
    losses = [(loss_of(model, x, y) * len(x), len(x)) for x, y in loader]
    model.train()
    total, count = fleet.metrics.sum([sum(column) for column in zip(*losses, strict=True)])
    return float(total / count / math.log(2))


@torch.no_grad()
def continued(model: nn.Module, start: str, length: int, *, more: int = 200) -> str:
    model.eval()
    text = torch.tensor([list(start.encode())], device=fleet.device())
    for _ in range(more):
        chances = torch.softmax(model(text[:, -length:])[0, -1] / 0.7, 0)
        text = torch.cat([text, torch.multinomial(chances, 1)[None]], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with *.txt files, also in its subfolders")
    parser.add_argument("--output", type=Path, default=Path("runs/language"), help="(default: runs/language)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="pieces per worker and step (default: 8)")
    parser.add_argument("--merge", type=int, default=2, help="steps per update (default: 2)")
    parser.add_argument("--lr", type=float, default=0.003, help="peak learning rate (default: 0.003)")
    parser.add_argument("--length", type=int, default=128, help="bytes per piece (default: 128)")
    parser.add_argument("--width", type=int, default=96, help="of the model, a multiple of 32 (default: 96)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile, do not recompute")
    args = parser.parse_args()

    fleet.init()
    fleet.record(args.output, predict_memory=True)
    torch.manual_seed(0)
    files, device = sorted((args.data or prepared.topics("example_data/topics")).rglob("*.txt")), fleet.device()
    text = b"\n\n".join(path.read_bytes() for path in files)
    cut = len(text) * 9 // 10
    train = fleet.loader(Pieces(text[:cut], args.length), args.batch, drop_last=True, device=device)
    val = fleet.loader(Pieces(text[cut:], args.length), args.batch, shuffle=False, device=device)

    model = GPT(args.length, args.width, args.layers).to(device)
    if args.compile:
        model.compile(backend=args.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    strategy = fleet.DistributedStrategy(gradient_merge={"k_steps": args.merge}, clip={"clip_norm": 1.0})
    if not args.compile:  # what is recomputed is not compiled
        strategy.recompute, strategy.recompute_configs = True, {"checkpoints": ["blocks.*"]}
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    total = args.epochs * len(train)
    schedule = large_batch(optimizer, updates=-(-total // args.merge), warmup=0.1, decay="cosine", by="updates")

    steps = fleet.checkpoints(args.output / "checkpoints", every=100, steps=total, loader=train, scheduler=schedule)
    if steps.resumed and fleet.is_first_worker():
        print(f"resumed after step {steps.step} of {total}; to start again, remove the folder {args.output}")
    batches = itertools.chain.from_iterable(itertools.repeat(train))  # epoch after epoch
    for step in fleet.progress(steps):
        loss_of(model, *next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % len(train) == 0:
            fleet.flush()  # the last merge of an epoch may have fewer steps
            found = bits_per_byte(model, val)
            fleet.log(bits_per_byte=found)
            if fleet.is_first_worker():
                print(f"epoch {(step + 1) // len(train)}: {found:.3f} bits per byte", flush=True)
    fleet.export(args.output / "model")
    said = continued(model, "The statement ", args.length)
    if fleet.is_first_worker():
        print(said, flush=True)


if __name__ == "__main__":
    main()
