"""Text that every Python has: the topics of its manual (pydoc_data.topics), as sequences of characters; and a model."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.frame import CannotRunError
from benchmarks.large_batch.data import Split

LENGTH = 64  # characters of a sequence
BLOCK = 32  # consecutive sequences that are trained with, or held out, or tested with together
WIDTH, HEADS, LAYERS = 64, 4, 2
KNOWN = "".join(map(chr, range(32, 127))) + "\n"  # everything else is one more character


@dataclass(frozen=True)
class Sequences:
    """Each character is to be predicted from those before it in its sequence."""

    characters: Tensor  # uint8, (n, LENGTH + 1)

    def __len__(self) -> int:
        return len(self.characters)

    def __getitem__(self, which: Tensor | slice) -> Sequences:
        return Sequences(self.characters[which])

    def inputs(self) -> Tensor:
        return self.characters[:, :-1].long()

    def targets(self) -> Tensor:
        return self.characters[:, 1:].long()


def missing() -> str:
    found = importlib.util.find_spec("pydoc_data") is not None and importlib.util.find_spec("pydoc_data.topics")
    return "" if found else "this Python has no pydoc_data.topics, which is part of its standard library elsewhere"


def load(train: int) -> Split:
    """Of every ten blocks, one is held out and one is for testing; the first `train` sequences of the others train."""
    if reason := missing():
        raise CannotRunError(reason)
    from pydoc_data.topics import topics

    table = {character: i for i, character in enumerate(KNOWN)}
    text = "\n".join(topics[name] for name in sorted(topics))
    codes = torch.tensor([table.get(c, len(KNOWN)) for c in text], dtype=torch.uint8)
    sequences = codes.unfold(0, LENGTH + 1, LENGTH)
    block = torch.arange(len(sequences)) // BLOCK % 10
    every = Sequences(sequences[(block != 4) & (block != 9)])
    if len(every) < train:
        raise CannotRunError(f"the text has {len(every)} sequences to train with, but the study needs {train}")
    return Split(every[:train], Sequences(sequences[block == 4]), Sequences(sequences[block == 9]))


class Layer(nn.Module):
    """Attention to earlier characters, then a network per character."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """A small transformer over characters."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(KNOWN) + 1, width)
        self.position = nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(KNOWN) + 1)
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters) + self.position.weight[: characters.shape[1]]
        return self.head(self.norm(self.layers(x)))
