"""Read any region of a saved tensor, from whichever pieces it was saved in."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import torch
from torch import Tensor

from fleetx.engine.checkpoint.manifest import INDEX, Chunk, Index, SavedTensor, rank_tensors
from fleetx.engine.checkpoint.snapshot import Region
from fleetx.engine.checkpoint.tensor_file import DTYPES, TensorFile
from fleetx.errors import CheckpointError

HeldBy = frozenset[int] | None  # whose values to read; None: any rank's


class Chunks:
    """The tensors of a checkpoint whose hashes were checked. Checks that the index and the files agree."""

    def __init__(self, folder: Path, index: Index, ranks: int):
        self._folder, self._index, self._ranks = folder, index, ranks
        self._files: dict[int, TensorFile] = {}
        for name, entry in index.tensors.items():
            self._check(name, entry)

    def __contains__(self, name: str) -> bool:
        return name in self._index.tensors

    def names(self) -> list[str]:
        return list(self._index.tensors)

    def described(self, name: str) -> tuple[torch.dtype, tuple[int, ...], bool]:
        """dtype and shape as stored, and whether it is complex."""
        entry = self._index.tensors[name]
        return DTYPES[_real(entry.dtype)], tuple(entry.shape), entry.dtype.startswith("C")

    def differs(self, name: str) -> bool:
        """Did ranks hold different values of the same piece?"""
        regions = [_region(chunk) for chunk in self._index.tensors[name].chunks]
        return len(set(regions)) < len(regions)

    def regions(self, name: str) -> dict[int, Region]:
        """What each rank held of a tensor."""
        return {rank: _region(c) for c in self._index.tensors[name].chunks for rank in c.holders}

    def lacked(self, name: str, parameter: str, ranks: HeldBy) -> bool:
        """Did they have the parameter, but not this state of it? A branch that was never used has no momentum."""
        owned = f"model.{parameter}"
        if ranks is None or owned not in self or not ranks & self.regions(owned).keys():
            return False
        return not ranks & self.regions(name).keys()

    def file(self, rank: int) -> TensorFile:
        if rank not in self._files:
            self._files[rank] = TensorFile(self._folder / rank_tensors(rank))
        return self._files[rank]

    def read(self, name: str, region: Region, out: Tensor, *, ranks: HeldBy, mean: bool) -> None:
        """Copy a region into a tensor of its shape.

        ranks: prefer what these held. If they held different values, take their mean (`mean`, for floating-point
        values), or the values of the first.
        """
        chunks = self._index.tensors[name].chunks
        if ranks is not None:
            chunks = [c for c in chunks if ranks.intersection(c.holders)] or chunks  # stages may not be divided yet
        groups = [list(group) for _, group in itertools.groupby(sorted(chunks, key=_region), key=_region)]
        filled = 0
        for alike in groups:
            overlap = _overlap(region, _region(alike[0]))
            if overlap is None:
                continue
            there = out[tuple(slice(a - o, b - o) for (a, b), o in zip(overlap, region[0], strict=True))]
            parts = [self._part(name, chunk, overlap) for chunk in (alike if mean else alike[:1])]
            held = [len(chunk.holders if ranks is None else ranks.intersection(chunk.holders)) for chunk in alike]
            _copy(parts[0] if len(parts) == 1 else _mean(parts, held), there)
            filled += there.numel()
        if filled != out.numel():
            raise CheckpointError(self._folder / INDEX, f"has only {filled} of {out.numel()} values of {name}")

    def _part(self, name: str, chunk: Chunk, overlap: list[tuple[int, int]]) -> Tensor:
        whole = self.file(chunk.writer).tensor(name)
        return whole[tuple(slice(a - o, b - o) for (a, b), o in zip(overlap, chunk.offsets, strict=True))]

    def _check(self, name: str, entry: SavedTensor) -> None:
        path = self._folder / INDEX
        if _real(entry.dtype) not in DTYPES:
            raise CheckpointError(path, f"{name!r} has an unknown type: {entry.dtype[:40]}")
        if len({chunk.writer for chunk in entry.chunks}) < len(entry.chunks):
            raise CheckpointError(path, f"{name!r} has two pieces from one rank")
        for chunk in entry.chunks:
            if not len(chunk.offsets) == len(chunk.shape) == len(entry.shape):
                raise CheckpointError(path, f"{name!r} has a piece with a different number of dimensions")
            if any(o + n > w for o, n, w in zip(chunk.offsets, chunk.shape, entry.shape, strict=True)):
                raise CheckpointError(path, f"{name!r} has a piece outside its shape")
            if max(chunk.writer, *chunk.holders, 0) >= self._ranks:
                raise CheckpointError(path, f"{name!r} has a piece of a rank that does not exist")
            file = self.file(chunk.writer)
            if name not in file or file.described(name) != (DTYPES[_real(entry.dtype)], tuple(chunk.shape)):
                raise CheckpointError(path, f"{name!r} is not in {rank_tensors(chunk.writer)} as described")
        regions = [r for r in {_region(chunk) for chunk in entry.chunks} if math.prod(r[1])]
        if _any_overlap(regions):
            raise CheckpointError(path, f"{name!r} has pieces that overlap")
        if sum(math.prod(shape) for _, shape in regions) != math.prod(entry.shape):
            raise CheckpointError(path, f"{name!r} is not complete")


def _region(chunk: Chunk) -> Region:
    return tuple(chunk.offsets), tuple(chunk.shape)


def _overlap(a: Region, b: Region) -> list[tuple[int, int]] | None:
    """[(begin, end) of each dimension], or None if they have nothing in common."""
    found = [(max(o, p), min(o + n, p + m)) for o, n, p, m in zip(a[0], a[1], b[0], b[1], strict=True)]
    return found if all(begin < end for begin, end in found) else None


def _any_overlap(regions: list[Region]) -> bool:
    """Compares each only with those that begin before it ends, along the dimension with the most distinct offsets."""
    if len(regions) < 2:
        return False
    along = max(range(len(regions[0][0])), key=lambda d: len({offsets[d] for offsets, _ in regions}))
    regions = sorted(regions, key=lambda region: region[0][along])
    for number, one in enumerate(regions):
        for other in range(number + 1, len(regions)):
            if regions[other][0][along] >= one[0][along] + one[1][along]:
                break
            if _overlap(one, regions[other]):
                return True
    return False


def _copy(part: Tensor, there: Tensor) -> None:
    for dim, (size, stride) in enumerate(zip(there.shape, there.stride(), strict=True)):
        if size > 1 and not stride:  # expanded: these elements share memory, and torch refuses to write to them
            part, there = part.narrow(dim, 0, 1), there.narrow(dim, 0, 1)
    there.copy_(part)


def _mean(parts: list[Tensor], ranks: list[int]) -> Tensor:
    """The mean over ranks. ranks: how many of them held each part."""
    if not parts[0].is_floating_point():
        return parts[0]
    ranks = ranks if all(ranks) else [1] * len(parts)
    total = torch.zeros(parts[0].shape, dtype=torch.float64)
    for part, count in zip(parts, ranks, strict=True):
        total.add_(part, alpha=count)
    return (total / sum(ranks)).to(parts[0].dtype)


def _real(dtype: str) -> str:
    return dtype.removeprefix("C")
