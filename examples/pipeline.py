"""BERT in two stages on two workers: neither holds the whole model.

    fleetrun --device cpu --nproc_per_node 2 examples/pipeline.py
    fleetrun --device cpu --nproc_per_node 2 examples/pipeline.py --balanced      # find the cut automatically
    fleetrun --device cpu --nproc_per_node 4 examples/pipeline.py                 # two pipelines

It writes its text to ./example_data/text, as lines of numbers.
"""

from __future__ import annotations

import argparse

import prepared
import torch

import fleetx as X
from fleetx import fleet

STAGES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="sentences per pipeline and step (default: 32)")
    parser.add_argument("--micro", type=int, default=4, help="micro-batches per batch (default: 4)")
    parser.add_argument("--schedule", default="1F1B", help="the order of forwards and backwards (default: 1F1B)")
    parser.add_argument("--balanced", action="store_true", help="time the layers, and balance the stages")
    args = parser.parse_args()

    fleet.init(is_collective=True)
    torch.manual_seed(0)
    model = X.applications.BertBase(layers=4, hidden=128, vocab_size=prepared.WORDS, max_seq_len=64).to(fleet.device())
    strategy = fleet.DistributedStrategy()
    strategy.pipeline = True
    cut = {"degree": STAGES} if args.balanced else {"stages": ["bert.encoder.layer.2"]}
    strategy.pipeline_configs = {"micro_batch": args.micro, "schedule_mode": args.schedule, **cut}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    model, optimizer = fleet.distribute(model, optimizer, strategy)

    # The workers of one pipeline need the same batches; masked="row" makes batches that can be split.
    text = prepared.text("example_data/text")
    loader = model.load_digital_dataset_from_file(
        text, text / "vocab.txt", args.batch, max_seq_len=64, in_tokens=False, lang="ch", drop_last=True, masked="row"
    )
    step = 0
    while step < args.steps:
        for batch in loader:
            loss = fleet.forward_backward({name: tensor.to(fleet.device()) for name, tensor in batch.items()})
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if fleet.is_first_worker() and step == 1:
                print(fleet.explain(), flush=True)
            if fleet.is_first_worker() and (step == 1 or step % 10 == 0):
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            if step == args.steps:
                break
    here = sum(p.nbytes for p in model.parameters() if not p.is_meta) / 2**20
    print(f"worker {fleet.worker_index()} holds {here:.1f} MiB of parameters", flush=True)


if __name__ == "__main__":
    main()
