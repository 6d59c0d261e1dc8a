"""The task in one process, without a network: python -m benchmarks.slow_network.simulated --help

Time does not count here, only accuracy, so it can run on a busy machine with as many seeds as a claim needs. All ranks
are rows of one matrix of parameters. `ddp`, `local8`, `overlap8` and `adaptive16` are what the methods of task.py do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.large_batch.data import FOLDER, load

MOMENTUM = 0.9
JUDGED = 8192  # training images for the loss
WATCHED = 16  # steps between two looks at the distance of the ranks


@dataclass(frozen=True)
class Rule:
    """When the ranks are averaged, and how the average is applied.

    period: steps between two averages; 0: the gradients are averaged in every step.
    share: None: the average is applied at once; otherwise so much of the distance to it, `delay` steps later.
    adaptive: the period follows the loss and the learning rate. longest, shortest: its limits.
    begin: up to this step, the average of every step is applied at once.
    """

    period: int = 0
    share: float | None = None
    delay: int = 0
    adaptive: bool = False
    longest: int = 16
    shortest: int = 1
    begin: int = 1

    def late(self, **more: Any) -> Rule:
        return replace(self, **{"share": 0.5, "delay": self.period, **more})


def rules() -> dict[str, Rule]:
    found = {"ddp": Rule()}
    for k in (2, 4, 8, 16, 32):
        local = Rule(k)
        found[f"local{k}"] = local
        found[f"overlap{k}"] = local.late()
        for share in (0.25, 0.75, 1.0):
            found[f"overlap{k}_share{share:g}"] = local.late(share=share)
        for part in (1, 2, 4):
            found[f"overlap{k}_delay{k // part}"] = local.late(share=1.0, delay=k // part)
            found[f"overlap{k}_half{k // part}"] = local.late(delay=k // part)
        found[f"overlap{k}_begin64"] = local.late(begin=64)
        found[f"adaptive{k}"] = Rule(k, adaptive=True, longest=max(16, k))
        found[f"adaptive{k}_to8"] = Rule(k, adaptive=True, longest=8)
        found[f"adaptive{k}_begin64"] = Rule(k, adaptive=True, longest=max(16, k), begin=64)
    return found


class Network:
    """784 - width - width - 10 for several ranks, on rows of one matrix of parameters."""

    def __init__(self, ranks: int, width: int, seed: int):
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(a, b) for a, b in ((784, width), (width, width), (width, 10))]
        self.shapes = [p.shape for layer in layers for p in layer.parameters()]
        one = torch.cat([p.detach().reshape(-1) for layer in layers for p in layer.parameters()])
        self.parameters = one.repeat(ranks, 1)

    def losses(self, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Of every rank: x is (ranks, batch, 784), y is (ranks, batch)."""
        each = cross_entropy(self.logits(parameters, x).flatten(0, 1), y.flatten(), reduction="none")
        return each.view(y.shape).mean(1)

    def logits(self, parameters: Tensor, x: Tensor) -> Tensor:
        pieces = iter(parameters.split([math.prod(shape) for shape in self.shapes], dim=1))
        for i in range(0, len(self.shapes), 2):
            weight, bias = (next(pieces).view(-1, *self.shapes[i + j]) for j in (0, 1))
            x = torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
            x = x if i + 2 == len(self.shapes) else x.relu()
        return x


@dataclass(frozen=True)
class Task:
    steps: int = 417
    ranks: int = 2
    batch: int = 128
    width: int = 704
    hold_out: int = 10_000
    data: str = str(FOLDER)


def trained(rule: Rule, task: Task, rate: float, seed: int, images: Any) -> dict[str, Any]:
    split, pixels = images
    labels = split.train.labels
    network = Network(task.ranks, task.width, seed)
    p = network.parameters.requires_grad_()
    buffer = torch.zeros_like(p)
    generator = torch.Generator().manual_seed(1000 + seed)
    epochs = -(-task.steps * task.ranks * task.batch // len(labels))
    order = torch.cat([torch.randperm(len(labels), generator=generator) for _ in range(epochs)])
    order = order[: task.steps * task.ranks * task.batch].view(task.steps, task.ranks, task.batch)
    period, last, first_loss, first_rate = rule.period, 0, 0.0, 0.0
    sent: list[tuple[int, Tensor]] = []  # step and what each rank lacks to the mean, of averages under way
    periods, distances, averages = [], [], 0
    for step, which in enumerate(order, start=1):
        lr = rate * (1 - (step - 1) / task.steps)
        losses = network.losses(p, pixels[which], labels[which])
        (grad,) = torch.autograd.grad(losses.sum(), p)
        with torch.no_grad():
            if not rule.period:
                grad = grad.mean(0, keepdim=True).expand_as(p)
            buffer.mul_(MOMENTUM).add_(grad)
            p.sub_(buffer, alpha=lr)
            loss = losses.mean().item()
            if step == 1:
                first_loss, first_rate = loss, lr
            if step % WATCHED == 0:
                distances.append((p - p.mean(0)).norm(dim=1).mean().item())
            if rule.period and rule.share is not None:
                while sent and step - sent[0][0] >= rule.delay:
                    p.add_(sent.pop(0)[1], alpha=rule.share)
            if rule.period and (step <= rule.begin or step - last >= period):
                last = step
                averages += 1
                if rule.share is None or step < rule.begin:
                    p.copy_(p.mean(0).expand_as(p))
                else:
                    sent.append((step, p.mean(0) - p))
                if rule.adaptive and step > rule.begin:
                    k = math.ceil(math.sqrt(first_rate * loss / (lr * first_loss)) * rule.period)
                    period = min(max(k, rule.shortest), rule.longest)
                    periods.append((step, period))
    with torch.no_grad():
        final = p.mean(0, keepdim=True)
        test = split.test
        right = sum(
            (network.logits(final, part.normalised().flatten(1).unsqueeze(0))[0].argmax(1) == part.labels).sum().item()
            for start in range(0, len(test), 1000)
            for part in [test[slice(start, start + 1000)]]
        )
        loss = network.losses(final, pixels[:JUDGED].unsqueeze(0), labels[:JUDGED].unsqueeze(0)).item()
    return {"accuracy": right / len(test), "loss": loss, "averages": averages, "periods": periods,
            "distances": [round(d, 4) for d in distances]}  # fmt: skip


def chosen(names: str, rates: str, seeds: int) -> Iterator[tuple[str, Rule, float, int]]:
    known = rules()
    for seed in range(seeds):
        for name in names.split(","):
            for rate in map(float, rates.split(",")):
                yield name, known[name], rate, seed


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rules", "names", default="ddp,local8,overlap8", show_default=True)
@click.option("--rates", default="0.1,0.2", show_default=True, help="Learning rates.")
@click.option("--seeds", default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A file of rows; those in it are kept.")
def main(names: str, rates: str, seeds: int, out: Path) -> None:
    """Train with every rule, learning rate and seed, and print mean and standard deviation."""
    torch.set_num_threads(1)
    task = Task()
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(row["rule"], row["rate"], row["seed"]) for row in rows}
    images = None
    for name, rule, rate, seed in chosen(names, rates, seeds):
        if (name, rate, seed) in done:
            continue
        if images is None:
            split = load(Path(task.data), train=-task.hold_out)
            images = split, split.train.normalised().flatten(1)
        row = {"rule": name, "rate": rate, "seed": seed, **trained(rule, task, rate, seed, images)}
        rows.append(row)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name:22} {rate:g} seed {seed}: {row['accuracy']:.2%}, loss {row['loss']:.4f}, "
              f"{row['averages']} averages", flush=True)  # fmt: skip
    show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    kinds = dict.fromkeys((row["rule"], row["rate"]) for row in rows)
    print("| rule | learning rate | accuracy | loss | averages | seeds |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for rule, rate in kinds:
        same = [row for row in rows if (row["rule"], row["rate"]) == (rule, rate)]

        def figure(key: str, word: Callable[[float], str], same: list[dict[str, Any]] = same) -> str:
            values = [row[key] for row in same]
            return word(mean(values)) + (f" ± {word(stdev(values))}" if len(values) > 1 else "")

        accuracy, loss = figure("accuracy", lambda x: f"{100 * x:.2f}"), figure("loss", lambda x: f"{x:.4f}")
        averages = mean(row["averages"] for row in same)
        print(f"| {rule} | {rate:g} | {accuracy} | {loss} | {averages:.0f} | {len(same)} |")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.slow_network.simulated")
