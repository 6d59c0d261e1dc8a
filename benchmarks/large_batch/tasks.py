"""The two tasks of the study. Batches are shares of the samples to train with, as in Paddle's table for ImageNet.

There, 8k, 16k, 32k and 64k images are 0.6, 1.25, 2.5 and 5 % of the data set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.large_batch import data, text
from benchmarks.large_batch.model import ResNet

SHARES = (0.005, 0.0125, 0.025, 0.05, 0.1)
SMOOTHING = 0.1


@dataclass(frozen=True)
class Task:
    name: str
    title: str
    samples: int  # to train with
    step: int  # samples of a step of all workers together, at most
    epochs: int
    missing: Callable[[Path], str]  # how to get the data, or ""
    load: Callable[[Path, int], data.Split]  # with so many samples to train with
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    score: Callable[[nn.Module, Any], Tensor]  # [sum over the samples, their number]; more is better
    shown: Callable[[float], str]
    measure: str  # what `shown` shows
    tolerance: float  # how far below the baseline's a score may be and still counts as kept
    kept: str  # the same in words

    def batch(self, share: float) -> int:
        """The samples of an update."""
        return max(round(share * self.samples), 1)

    def merged(self, share: float) -> int:
        """The steps of an update, of at most `step` samples each."""
        batch = self.batch(share)
        return next(k for k in range(-(-batch // self.step), batch + 1) if batch % k == 0)


# --- images ---------------------------------------------------------------------------------------
def _image_model() -> nn.Module:
    return ResNet().to(memory_format=torch.channels_last)


def _image_loss(model: nn.Module, some: data.Images) -> Tensor:
    return cross_entropy(model(some.normalised()), some.labels, label_smoothing=SMOOTHING)


def _image_score(model: nn.Module, some: data.Images) -> Tensor:
    right = (model(some.normalised()).argmax(1) == some.labels).sum()
    return torch.tensor([float(right), len(some)], dtype=torch.float64)


# --- text -----------------------------------------------------------------------------------------
def _text_loss(model: nn.Module, some: text.Sequences) -> Tensor:
    return cross_entropy(model(some.inputs()).flatten(0, 1), some.targets().flatten())


def _text_score(model: nn.Module, some: text.Sequences) -> Tensor:
    """The logarithm of the probability, per character."""
    loss = _text_loss(model, some).double() * len(some)
    return torch.tensor([-float(loss), len(some)], dtype=torch.float64)


def _perplexity(score: float) -> str:
    return f"{math.exp(-score):.3f}" if score > -20 else "diverged"


TASKS = {
    "images": Task(
        "images", "Fashion-MNIST", 24_000, 120, 8, data.missing, lambda folder, train: data.load(folder, train=train),
        _image_model, _image_loss, _image_score, "{:.2%}".format, "accuracy", 0.003, "0.3 points",
    ),
    "text": Task(
        "text", "Python's manual", 2_400, 12, 8, lambda folder: text.missing(), lambda folder, train: text.load(train),
        text.LanguageModel, _text_loss, _text_score, _perplexity, "perplexity",
        0.02, "2 % of the perplexity",
    ),
}  # fmt: skip
