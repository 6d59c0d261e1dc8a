"""Fine-tune a model of transformers to classify texts.

    fleetrun --device cpu --nproc_per_node 2 examples/finetune.py && fleetx report runs/finetune
    fleetrun examples/finetune.py --model distilbert-base-uncased --data reviews --lr 5e-5 --epochs 3

--data is a folder with train.tsv and val.tsv; a line is `label<tab>text`. Without it, sentences of Python's own
documentation are written to ./example_data/docstrings: from which package does each come? Without --model, a tiny BERT
with fresh weights is written to ./example_data/tiny_bert. --output gets checkpoints, the record of the run and the
trained model. The same command resumes a run that was interrupted.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import prepared
import torch
from torch import nn

from fleetx import fleet
from fleetx.schedule import large_batch


def read(path: Path) -> tuple[list[str], list[str]]:
    """Labels and texts."""
    pairs = [line.split("\t", 1) for line in path.read_text(encoding="utf-8").splitlines()]
    return [label for label, _ in pairs], [text for _, text in pairs]


@torch.no_grad()
def accuracy(model: nn.Module, loader: object) -> float:
    """Each worker evaluates its share."""
    model.eval()
    right = [((model(**batch).logits.argmax(1) == batch["labels"]).sum(), len(batch["labels"])) for batch in loader]
    model.train()
    found, total = fleet.metrics.sum([sum(column) for column in zip(*right, strict=True)])
    return float(found / total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name on the Hugging Face Hub, or a folder")
    parser.add_argument("--data", type=Path, help="a folder with train.tsv and val.tsv")
    parser.add_argument("--output", type=Path, default=Path("runs/finetune"), help="(default: runs/finetune)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="texts per worker and step (default: 16)")
    parser.add_argument("--merge", type=int, default=2, help="steps per update (default: 2)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (default: 0.001)")
    parser.add_argument("--length", type=int, default=32, help="tokens per text, at most (default: 32)")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="use torch.compile")
    args = parser.parse_args()

    fleet.init()
    fleet.record(args.output, predict_memory=True)
    transformers = prepared.transformers()
    data, device = args.data or prepared.docstrings("example_data/docstrings"), fleet.device()
    labels, texts = read(data / "train.tsv")
    folder = args.model or prepared.tiny_bert("example_data/tiny_bert", texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    classes = sorted(set(labels))
    torch.manual_seed(0)  # of the new classifier
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, id2label=dict(enumerate(classes)), label2id={name: number for number, name in enumerate(classes)}
    ).to(device)
    if args.compile:
        model.compile(backend=args.compile)

    def collated(samples: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
        batch = tokenizer(
            [t for _, t in samples], padding=True, truncation=True, max_length=args.length, return_tensors="pt"
        )
        return {**batch, "labels": torch.tensor([classes.index(label) for label, _ in samples])}

    samples, held_out = list(zip(labels, texts, strict=True)), list(zip(*read(data / "val.tsv"), strict=True))
    train = fleet.loader(samples, args.batch, collate_fn=collated, drop_last=True, device=device)
    val = fleet.loader(held_out, 64, shuffle=False, collate_fn=collated, device=device)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    strategy = fleet.DistributedStrategy(gradient_merge={"k_steps": args.merge}, clip={"clip_norm": 1.0})
    if device.type == "cuda":  # most CPUs compute bfloat16 more slowly
        strategy.amp, strategy.amp_configs = True, {"dtype": "bfloat16"}
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    total = args.epochs * len(train)
    schedule = large_batch(optimizer, updates=-(-total // args.merge), warmup=0.1, decay="linear", by="updates")

    steps = fleet.checkpoints(args.output / "checkpoints", every=100, steps=total, loader=train, scheduler=schedule)
    if steps.resumed and fleet.is_first_worker():
        print(f"resumed after step {steps.step} of {total}; to start again, remove the folder {args.output}")
    batches = itertools.chain.from_iterable(itertools.repeat(train))  # epoch after epoch
    for step in fleet.progress(steps):
        model(**next(batches)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % len(train) == 0:
            fleet.flush()  # the last merge of an epoch may have fewer steps
            found = accuracy(model, val)
            fleet.log(accuracy=found)
            if fleet.is_first_worker():
                print(f"epoch {(step + 1) // len(train)}: accuracy {found:.1%}", flush=True)
    fleet.export(args.output / "model")  # for from_pretrained
    if fleet.is_first_worker():
        tokenizer.save_pretrained(args.output / "model")


if __name__ == "__main__":
    main()
