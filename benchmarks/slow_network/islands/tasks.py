"""Trainings of seconds or a minute. Each parameter is used for 256 samples per step and worker, as in larger models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from benchmarks.large_batch import data, text
from benchmarks.large_batch.data import Split
from benchmarks.slow_network.methods import sgd

HOLD_OUT = 10_000  # images
SEQUENCES = 5_700  # of text to train with
WIDTH = {"images": 256, "text": 176}  # DGC compresses tensors of 16384 elements, which 97 characters of width 176 are
BATCH = 1000  # samples to evaluate at a time


@dataclass(frozen=True)
class Task:
    name: str
    title: str
    steps: int  # one more than a multiple of every period, so that a training ends just after an average
    every: int  # steps between two evaluations
    batch: int  # samples of a step and worker
    rate: float  # learning rate that is best for dense among powers of two times this
    load: Callable[[Path], Split]
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module, float], Optimizer]
    loss: Callable[[nn.Module, Any], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]  # of logits and targets, summed over the targets; more is better
    shown: Callable[[float], str]
    measure: str  # what `shown` shows


@dataclass(frozen=True)
class Samples:
    """Inputs and targets of either task."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, which: Tensor | slice) -> Samples:
        return Samples(self.inputs[which], self.targets[which])


def loss(model: nn.Module, some: Samples) -> Tensor:
    return cross_entropy(model(some.inputs).flatten(0, -2), some.targets.flatten())


# --- images ---------------------------------------------------------------------------------------
def images(folder: Path) -> Split:
    split = data.load(folder, train=-HOLD_OUT)
    return Split(*(Samples(x.normalised().flatten(1), x.labels) for x in (split.train, split.choose, split.test)))


def network() -> nn.Module:
    width = WIDTH["images"]
    hidden = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def right(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(-1) == targets).sum()


# --- text -----------------------------------------------------------------------------------------
def sequences(folder: Path) -> Split:
    """Half of the sequences that are held out or tested with, because evaluating all would take as long as training."""
    split = text.load(SEQUENCES)
    choose, test = split.choose[slice(0, None, 2)], split.test[slice(0, None, 2)]
    return Split(*(Samples(x.inputs(), x.targets()) for x in (split.train, choose, test)))


def adamw(model: nn.Module, rate: float) -> Optimizer:
    return AdamW(model.parameters(), lr=rate, weight_decay=0.01)


def likely(logits: Tensor, targets: Tensor) -> Tensor:
    """The logarithm of the probability of the targets."""
    return -cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def perplexity(score: float) -> str:
    return f"{math.exp(min(-score, 20)):.3f}"


TASKS = {
    "images": Task("images", "Fashion-MNIST", 513, 32, 256, 0.1, images, network, sgd, loss, right, "{:.2%}".format,
                   "accuracy"),
    "text": Task("text", "language model", 385, 64, 4, 0.002, sequences,
                 lambda: text.LanguageModel(WIDTH["text"], layers=1), adamw, loss, likely, perplexity, "perplexity"),
}  # fmt: skip
TASKS["long"] = replace(TASKS["text"], name="long", title="language model, four times as long", steps=1537, every=256)


def order(samples: int, *, steps: int, workers: int, batch: int, seed: int) -> Tensor:
    """The samples that each worker sees in each step, of shape (steps, workers, batch): the same for all methods."""
    wanted = steps * workers * batch
    generator = torch.Generator().manual_seed(1_000_003 + seed)
    epochs = [torch.randperm(samples, generator=generator) for _ in range(-(-wanted // samples))]
    return torch.cat(epochs)[:wanted].view(steps, workers, batch)
