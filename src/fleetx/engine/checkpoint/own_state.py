"""What each rank has kept for itself of every parameter, taken over by other ranks than those that saved it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetx.base.trees import as_real
from fleetx.engine.checkpoint.chunks import Chunks
from fleetx.engine.checkpoint.snapshot import Piece, Region, held, piece
from fleetx.engine.engine import Engine
from fleetx.engine.run import key_of


def taken_over(engine: Engine, chunks: Chunks, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of the parts, given those of each rank that saved."""
    found: dict[str, Any] = dict(states[0])
    for part in engine.plan.parts:
        if (key := key_of(part)) not in found:
            continue
        own = [state[key] for state in states]
        found[key] = part.for_other_ranks(own)
        for kept in part.own_per_parameter:
            if any(kept in one for one in own):
                found[key] = found[key] | {kept: _mean(engine, chunks, [one.get(kept, {}) for one in own])}
    return found


def _mean(engine: Engine, chunks: Chunks, kept: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    here = {name: piece(t) for name, t in held(engine).items()}
    names = dict.fromkeys(name for one in kept for name in one if name in here and f"model.{name}" in chunks)
    return {
        name: _piece(here[name], chunks.regions(f"model.{name}"), [one.get(name) for one in kept]) for name in names
    }


def _piece(here: Piece, regions: Mapping[int, Region], kept: Sequence[Tensor | None]) -> Tensor:
    """A rank that has kept nothing counts as zero."""
    total = torch.zeros(here.whole, dtype=torch.float64)
    count = Counter(regions.values())
    for rank, t in enumerate(kept):
        if t is not None and rank in regions:
            region = regions[rank]
            total[_slices(region)] += as_real(t).reshape(region[1]).double() / count[region]
    dtype = next(t for t in kept if t is not None).dtype
    mine = total[_slices(here.region)]
    return torch.view_as_complex(mine.contiguous()).to(dtype) if dtype.is_complex else mine.to(dtype)


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(*region, strict=True))
