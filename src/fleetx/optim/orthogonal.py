"""The orthogonalization of Muon, and how ranks divide that work between them.

Ranks that hold the same matrices each take some of them and send the results to the others. Ranks that hold shards of
each matrix exchange shards for whole matrices, orthogonalize those, and send the shards back. Either way each matrix is
orthogonalized once, and there are one or two messages per block of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor

# From Jordan et al. 2024: singular values end between 0.7 and 1.2, which is close enough and takes few iterations.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7
BLOCK = 1 << 24  # elements whose updates a rank holds at the same time


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Approximate U V^T, where U S V^T is the singular value decomposition of the matrix."""
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def sides(shape: Size) -> tuple[int, int]:
    """Rows and columns: a convolution is a matrix with a row per output channel."""
    return shape[0], shape[1:].numel()


@dataclass(frozen=True)
class Sharing:
    """Ranks that divide the work, and the dimension along which each holds a shard; None: each holds the whole."""

    group: Any
    dim: int | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)


def blocks(shapes: Sequence[Size], sharing: Sharing | None) -> Iterator[list[int]]:
    """Runs of positions whose matrices are orthogonalized together."""
    limit = BLOCK * (sharing.size if sharing is not None else 1)
    run: list[int] = []
    total = 0
    for i, shape in enumerate(shapes):
        if run and total + shape.numel() > limit:
            yield run
            run, total = [], 0
        run.append(i)
        total += shape.numel()
    if run:
        yield run


def owners(shapes: Sequence[Size], ranks: int) -> list[int]:
    """The rank that orthogonalizes each matrix: the costliest first, each by the rank with the least to do."""
    work, chosen = [0.0] * ranks, [0] * len(shapes)
    costs = [min(sides(shape)) ** 2 * max(sides(shape)) for shape in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        chosen[i] = work.index(min(work))
        work[chosen[i]] += costs[i]
    return chosen


def orthogonalized(
    make: Callable[[int], Tensor],
    shapes: Sequence[Size],
    *,
    steps: int,
    bf16: bool,
    like: Tensor,
    sharing: Sharing | None,
) -> list[Tensor]:
    """What this rank holds of each orthogonalized update.

    make: returns what this rank holds of an update. like: a tensor of their dtype and device.
    """

    def solve(t: Tensor) -> Tensor:
        matrix = t.reshape(sides(t.shape))
        return newton_schulz(matrix.bfloat16() if bf16 else matrix, steps).to(t.dtype).reshape(t.shape)

    if sharing is None:
        return [solve(make(i)) for i in range(len(shapes))]
    owner = owners(shapes, sharing.size)
    if sharing.dim is None:
        return _gathered(lambda i: solve(make(i)), shapes, owner, like, sharing)
    return _exchanged(make, solve, shapes, owner, like, sharing)


def _gathered(
    result: Callable[[int], Tensor], shapes: Sequence[Size], owner: Sequence[int], like: Tensor, sharing: Sharing
) -> list[Tensor]:
    """Compute the results that this rank owns and receive the others."""
    ranks = range(sharing.size)
    mine = [[i for i, o in enumerate(owner) if o == r] for r in ranks]
    longest = max(sum(shapes[i].numel() for i in of) for of in mine)
    if sharing.size * longest > 2 * sum(shape.numel() for shape in shapes):
        return _summed(result, shapes, mine[sharing.rank], like, sharing)
    sent, received = like.new_empty(longest), like.new_empty(sharing.size * longest)
    _pack([result(i) for i in mine[sharing.rank]], sent)
    dist.all_gather_single(received, sent, group=sharing.group)
    found: dict[int, Tensor] = {}
    for row, of in zip(received.view(sharing.size, longest), mine, strict=True):
        found |= zip(of, _unpack(row, [shapes[i] for i in of]), strict=True)
    return [found[i] for i in range(len(shapes))]


def _summed(
    result: Callable[[int], Tensor], shapes: Sequence[Size], mine: Sequence[int], like: Tensor, sharing: Sharing
) -> list[Tensor]:
    """The same if most ranks own nothing: a gather would receive padding from each of them. Here they add zeros."""
    flat = like.new_zeros(sum(shape.numel() for shape in shapes))
    views = _unpack(flat, shapes)
    for i in mine:
        views[i].copy_(result(i))
    dist.all_reduce(flat, group=sharing.group)
    return views


def _exchanged(
    make: Callable[[int], Tensor],
    solve: Callable[[Tensor], Tensor],
    shapes: Sequence[Size],
    owner: Sequence[int],
    like: Tensor,
    sharing: Sharing,
) -> list[Tensor]:
    """Exchange shards for whole tensors, solve these, and exchange them for shards again."""
    dim, ranks = sharing.dim or 0, range(sharing.size)
    lengths = [_lengths(shape[dim], sharing.size) for shape in shapes]
    pieces = [[Size((*s[:dim], n[r], *s[dim + 1 :])) for s, n in zip(shapes, lengths, strict=True)] for r in ranks]
    by_owner = sorted(range(len(shapes)), key=lambda i: owner[i])  # stable, so in order for each owner
    mine = [i for i in by_owner if owner[i] == sharing.rank]
    here = [sum(pieces[sharing.rank][i].numel() for i in by_owner if owner[i] == r) for r in ranks]  # by owner
    there = [sum(pieces[r][i].numel() for i in mine) for r in ranks]  # by the rank that holds the shard
    shards, wholes = like.new_empty(sum(here)), like.new_empty(sum(there))
    _pack([make(i) for i in by_owner], shards)
    dist.all_to_all_single(wholes, shards, there, here, group=sharing.group)
    received = [_unpack(part, [pieces[r][i] for i in mine]) for r, part in enumerate(wholes.split(there))]
    solved = [solve(torch.cat([of[k] for of in received], dim)).split(lengths[i], dim) for k, i in enumerate(mine)]
    _pack([solved[k][r] for r in ranks for k in range(len(mine))], wholes)
    dist.all_to_all_single(shards, wholes, here, there, group=sharing.group)
    found = dict(zip(by_owner, _unpack(shards, [pieces[sharing.rank][i] for i in by_owner]), strict=True))
    return [found[i] for i in range(len(shapes))]


def _lengths(length: int, ranks: int) -> list[int]:
    """How torch divides a dimension: the last ranks may have fewer, or none."""
    most = -(-length // ranks)
    return [max(0, min(most, length - r * most)) for r in range(ranks)]


def _pack(tensors: Sequence[Tensor], flat: Tensor) -> None:
    start = 0
    for t in tensors:
        flat[start : start + t.numel()].view(t.shape).copy_(t)
        start += t.numel()


def _unpack(flat: Tensor, shapes: Sequence[Size]) -> list[Tensor]:
    ends = list(accumulate(shape.numel() for shape in shapes))
    return [flat[end - shape.numel() : end].view(shape) for end, shape in zip(ends, shapes, strict=True)]
