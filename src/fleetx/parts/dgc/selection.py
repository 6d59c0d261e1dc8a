"""The update of u and v and the selection of the k largest, in torch, for any device. Nothing here waits for it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fleetx.parts.dgc.payload import Update

_PIECE = 1 << 22  # elements processed at a time: no temporary is as large as a large tensor
_INDEX = 0xFFFFFFFF


def select(update: Update) -> tuple[Tensor, Tensor]:
    """Update u and v. Returns the sorted indices of the k largest |v|, of equal ones the first, and the largest |v|.

    Magnitudes are bits, as in codec.c. A key is a magnitude followed by the index counted down, so no two are equal.
    """
    top = advance(update)
    keys = []
    for s in _pieces(update.n):
        down = torch.arange(_INDEX - s.start, _INDEX - s.stop, -1, device=top.device)
        piece = (magnitudes(update.v_out[s]).long() << 32) + down
        keys.append(piece.topk(min(update.k, len(piece)), sorted=False).values)
    largest = torch.cat(keys).topk(update.k, sorted=False).values
    return (_INDEX - (largest & _INDEX)).sort().values, top


def advance(update: Update) -> Tensor:
    """Update u and v. Returns the largest |v|."""
    factor = limited(update)
    tops = []
    for s in _pieces(update.n):
        x = update.u[s].mul(update.momentum)
        x = x.addcmul_(update.g[s], factor) if isinstance(factor, Tensor) else x.add_(update.g[s], alpha=factor)
        if update.p is not None:
            x.add_(update.p[s], alpha=update.decay)
        y = update.v[s].add(x)
        update.u_out[s], update.v_out[s] = x, y
        tops.append(magnitudes(y).amax())
    return torch.stack(tops).amax()


def limited(update: Update) -> Tensor | float:
    """What the gradient is multiplied by; a number on the device if its norm is limited."""
    if update.norm_limit is None:
        return update.factor
    norm = torch.linalg.vector_norm(update.g, dtype=torch.float64) * abs(update.factor)
    scales = (norm > update.norm_limit) & norm.isfinite()
    return torch.where(scales, update.factor * update.norm_limit / norm, update.factor).float()


def magnitudes(x: Tensor) -> Tensor:
    """The bits without the sign, which order like the magnitudes; infinity and nan are largest."""
    return x.view(torch.int32) & 0x7FFFFFFF


def _pieces(n: int) -> Iterator[slice]:
    return (slice(start, min(start + _PIECE, n)) for start in range(0, n, _PIECE))
