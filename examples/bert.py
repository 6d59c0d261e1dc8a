"""Train BERT on the documentation of this project with recompute, gradient merge, LAMB and clipping; save and resume.

    fleetrun --device cpu --nproc_per_node 2 examples/bert.py
    fleetrun --device cpu --nproc_per_node 2 examples/bert.py --steps 80     # resumes the first run

The tokenized text is written to ./example_data/text, the checkpoint to ./example_data/bert.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import prepared
import torch

import fleetx as X
from fleetx import fleet

FOLDER = Path("example_data/bert")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=16, help="sentence pairs per worker and step (default: 16)")
    parser.add_argument("--merge", type=int, default=2, help="steps per update (default: 2)")
    parser.add_argument("--rate", type=float, default=0.005)
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile, do not recompute")
    args = parser.parse_args()

    fleet.init(is_collective=True)
    torch.manual_seed(0)
    model = X.applications.BertBase(layers=4, hidden=128, vocab_size=prepared.WORDS, max_seq_len=64).to(fleet.device())
    if args.compile:
        model.compile(backend=args.compile)
    text = prepared.text("example_data/text")
    loader = model.load_digital_dataset_from_file(
        text, text / "vocab.txt", args.batch, max_seq_len=64, in_tokens=False, lang="ch", drop_last=True
    )

    strategy = fleet.DistributedStrategy()
    strategy.recompute = not args.compile  # what is recomputed is not compiled
    strategy.recompute_configs = {"checkpoints": model.checkpoints}
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": args.merge}
    strategy.lamb = True
    strategy.lamb_configs = {"exclude_from_weight_decay": ["LayerNorm", "bias"]}
    strategy.clip = True
    optimizer = torch.optim.Adam(model.parameters(), lr=args.rate)  # weight decay is in lamb_configs
    model, optimizer = fleet.distribute(model, optimizer, strategy)

    if FOLDER.exists():
        fleet.load(FOLDER, loader=loader)
        if fleet.is_first_worker():
            print(f"resuming at epoch {loader.epoch}, sample {loader.position}", flush=True)
    step = 0
    while step < args.steps:
        for batch in loader:
            output = model(**{name: tensor.to(fleet.device()) for name, tensor in batch.items()})
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if fleet.is_first_worker() and step % 20 == 0:
                print(
                    f"step {step}: loss {output.loss.item():.3f}, masked words {output.mask_lm_loss.item():.3f}",
                    flush=True,
                )
            if step == args.steps:
                break
    fleet.save(FOLDER, loader=loader)


if __name__ == "__main__":
    main()
