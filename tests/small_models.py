"""Small models of what matters: sums in place, batch norm, dropout, several tensors between blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """As in the ResNets of transformers: the sum is made in place, between two modules."""

    def __init__(self, channels: int):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.act1, self.act2, self.drop = nn.ReLU(), nn.ReLU(inplace=True), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(self.act1(self.norm1(self.first(x)))))
        y += x
        return self.drop(self.act2(y))


class Convolutions(nn.Module):
    def __init__(self, blocks: int = 4, channels: int = 8):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*[Residual(channels) for _ in range(blocks)])
        self.head = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5
        scores = scores if mask is None else scores + mask
        return self.norm(x + self.drop(self.out(scores.softmax(-1) @ v)))


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.attention(x, mask=mask)
        return self.norm(x + self.down(self.act(self.up(x)))), x


class Transformer(nn.Module):
    """Hands two tensors from layer to layer."""

    def __init__(self, layers: int = 4, width: int = 32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self.head = nn.Linear(width, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.embed(ids), torch.zeros(ids.shape[1], ids.shape[1])
        total = 0.0
        for layer in self.layers:
            x, inner = layer(x, mask)
            total = total + inner.mean()
        return self.head(x) + total


def images(n: int = 8) -> tuple[Tensor, ...]:
    return (torch.randn(n, 3, 12, 12, generator=torch.Generator().manual_seed(2)),)


def tokens(n: int = 8, length: int = 16) -> tuple[Tensor, ...]:
    return (torch.randint(0, 50, (n, length), generator=torch.Generator().manual_seed(2)),)


MODELS = {"convolutions": (Convolutions, images), "transformer": (Transformer, tokens)}
