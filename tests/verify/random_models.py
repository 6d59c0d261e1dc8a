"""Small models of many kinds, all (batch, WIDTH) -> (batch, OUT), for the random trainings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

WIDTH, OUT = 8, 3


class Block(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.inner, self.outer = norm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 4, 3, padding=1, bias=False), nn.BatchNorm1d(4)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x.unsqueeze(1)))).mean(1)


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.GroupNorm(3, 3)

    def forward(self, x):
        return x + self.norm(self.conv(x.view(-1, 1, 2, WIDTH // 2))).mean(1).flatten(1)


class Words(nn.Module):
    """An embedding, most of whose rows a batch does not use."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, WIDTH)

    def forward(self, x):
        return x + self.words((x.detach().abs() * 10).long() % 40).mean(1)


class Attention(nn.Module):
    """Four tokens of two numbers. A bias of the keys would have a gradient of noise."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)
        self.attend = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)

    def forward(self, x):
        y = self.up(x.view(-1, 4, 2))
        return x + self.down(self.attend(y, y, y, need_weights=False)[0]).flatten(1)


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.recurrent = kind(2, 5, batch_first=True)
        self.down = nn.Linear(5, WIDTH)

    def forward(self, x):
        return x + self.down(self.recurrent(x.view(-1, 4, 2))[0][:, -1])


class Uneven(nn.Module):
    """Shapes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.one, self.column = nn.Parameter(torch.ones(1)), nn.Parameter(torch.randn(WIDTH, 1) / 3)
        self.thick, self.last = nn.Parameter(torch.randn(3, 1, WIDTH) / 3), nn.Parameter(torch.zeros(7))

    def forward(self, x):
        y = (x @ self.column) * self.thick.sum(0) * self.one
        return x + torch.tanh(y + nn.functional.pad(self.last, (0, 1)))


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.tensor(0.7)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.scale * torch.tanh(self.inner(x))


class Counting(nn.Module):
    """Buffers of several types; one is read and changed in every training forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float32))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False] * (WIDTH // 2)))

    def forward(self, x):
        y = torch.tanh(self.inner(x)) / (1 + self.seen.to(x.dtype) / 8)
        if self.training:
            self.seen += 1
            self.steps += 2
        return torch.where(self.mask, x + y, x)


class Sharing(nn.Module):
    """A weight that two layers use, once as an embedding."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.inner.weight

    def forward(self, x):
        picked = embedding((x.detach() > 0).sum(1) % WIDTH, self.inner.weight)
        return x + self.outer(torch.tanh(self.inner(x))) + picked


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(3, 2)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.blocks[2].weight = self.blocks[0].weight
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x):
        return self.head(self.blocks(x))


class Keywords(nn.Module):
    """A buffer, a scalar in the forward, a list of modules."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, OUT)
        self.register_buffer("mask", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x, scale=0.7):
        for block in self.blocks:
            x = torch.tanh(block(x * self.mask)) * scale
        return self.head(x)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn, self.inner = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128) / 3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + (torch.tanh(self.inner(x)) * self.turn).real + (x * self.turn).imag


class Branches(nn.Module):
    """Which branch a rank uses depends on its share of the batch."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.left(x) if float(x.detach().sum()) > 0 else self.right(x))


class Normalized(nn.Module):
    """A parametrized weight."""

    def __init__(self):
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Recomputing(nn.Module):
    """Recomputes on its own."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class InPlace(nn.Module):
    """Writes into what it made, calls a module twice, and has an autograd function of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("own", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, x):
        y = self.inner(torch.tanh(self.inner(x)))
        y.add_(self.own.to(y.dtype)).mul_(0.5)
        return x + Square.apply(torch.sigmoid(y))


class Transposed(nn.Module):
    """Weights whose memory is not in the order of their dimensions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / 4)

    def forward(self, x):
        return x + torch.tanh(self.conv(x.view(-1, 2, 2, 2)).flatten(1) @ self.matrix)


@dataclass(frozen=True)
class Kind:
    make: Callable[[], nn.Module]
    checkpoints: tuple[str, ...] = ("0.*",)  # for recompute
    cut: str | None = "0.2"  # for pipeline
    norms: bool = False  # has it a BatchNorm?
    counts: bool = False  # does it remember forwards?
    unused: bool = False  # does it need find_unused_parameters?
    shards: bool = True  # can sharding divide it?
    complex: bool = False  # has it complex parameters?
    checkpoints_itself: bool = False  # does it call torch.utils.checkpoint?


def chain(*blocks):
    return lambda: nn.Sequential(nn.Sequential(*(block() for block in blocks)), nn.Linear(WIDTH, OUT))


def frozen():
    model = chain(Block, Block, Block)()
    model[0][1].requires_grad_(False)
    return model


def normed():
    return Block(nn.BatchNorm1d)


def gru():
    return Recurrent(nn.GRU)


MODELS = {
    "layernorm": Kind(chain(Block, Block, Block), ("0.0", "0.2"), "0.1"),
    "batchnorm": Kind(chain(normed, normed, normed), norms=True),
    "convolution": Kind(chain(Convolution, Block, Block), ("0.0", "0.1"), norms=True),
    "picture": Kind(chain(Picture, Block, Picture)),
    "words": Kind(chain(Words, Block, Words)),
    "attention": Kind(chain(Attention, Block, Attention)),
    "lstm": Kind(chain(Recurrent, Block, Block)),
    "gru": Kind(chain(gru, Block, gru)),
    "uneven": Kind(chain(Uneven, Block, Uneven)),
    "scalar": Kind(chain(Scalar, Block, Scalar), shards=False),
    "counting": Kind(chain(Counting, Block, Counting), counts=True),
    "sharing": Kind(chain(Sharing, Block, Sharing)),
    "unused": Kind(chain(Unused, Block, Unused), unused=True),
    "tied": Kind(Tied, ("blocks.0", "head"), None),
    "keywords": Kind(Keywords, ("blocks.*",), None),
    "frozen": Kind(frozen, cut="0.1"),
    "complex": Kind(chain(Complex, Block, Complex), cut=None, shards=False, complex=True),
    "branches": Kind(chain(Branches, Block, Branches), cut=None, unused=True),
    "normalized": Kind(chain(Normalized, Block, Normalized)),
    "recomputing": Kind(chain(Recomputing, Block, Recomputing), ("0.1",), None, checkpoints_itself=True),
    "in_place": Kind(chain(InPlace, Block, InPlace)),
    "transposed": Kind(chain(Transposed, Block, Transposed)),
}
