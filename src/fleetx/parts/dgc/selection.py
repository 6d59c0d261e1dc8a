"""Updates u and v and selects the k largest, in torch, on any device. Nothing here waits for the device.

`selector` chooses between this and the Triton kernels, whose results are first compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import Parameter

from fleetx.base.triton_kernels import TritonKernels
from fleetx.parts.dgc.payload import Update

Select = Callable[[Update], tuple[Tensor, Tensor]]
_MOST = 2**31 - 1  # elements that the Triton kernels can count
_PIECE = 1 << 22  # elements processed at a time: no temporary is as large as a large tensor
_INDEX = 0xFFFFFFFF


def select(update: Update) -> tuple[Tensor, Tensor]:
    """Update u and v. Returns the sorted indices of the k largest |v| (of equal ones, the first) and the largest |v|.

    Magnitudes are bits, as in codec.c. A key is a magnitude followed by the index, counted down, so keys are unique.
    """
    top = largest(update)
    keys = []
    for s in pieces(update.n, _PIECE):
        down = torch.arange(_INDEX - s.start, _INDEX - s.stop, -1, device=top.device)
        piece = (magnitudes(update.v_out[s]).long() << 32) + down
        keys.append(piece.topk(min(update.k, len(piece)), sorted=False).values)
    chosen = torch.cat(keys).topk(update.k, sorted=False).values
    return (_INDEX - (chosen & _INDEX)).sort().values, top


def largest(update: Update) -> Tensor:
    """Update u and v. Returns the largest |v|."""
    return torch.stack([bits.amax() for _, bits in advance(update, limited(update), _PIECE)]).amax()


def advance(update: Update, factor: Tensor | float, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Update u and v in pieces of this size. Yields where each piece is, and the magnitudes of its v."""
    for s in pieces(update.n, size):
        x = update.u[s].mul(update.momentum)
        x = x.addcmul_(update.g[s], factor) if isinstance(factor, Tensor) else x.add_(update.g[s], alpha=factor)
        if update.p is not None:
            x.add_(update.p[s], alpha=update.decay)
        y = update.v[s].add(x)
        update.u_out[s], update.v_out[s] = x, y
        yield s, magnitudes(y)


def limited(update: Update) -> Tensor | float:
    """The factor for the gradient; a tensor on the device if its norm is limited."""
    if update.norm_limit is None:
        return update.factor
    norm = torch.linalg.vector_norm(update.g, dtype=torch.float64) * abs(update.factor)
    scales = (norm > update.norm_limit) & norm.isfinite()
    return torch.where(scales, update.factor * update.norm_limit / norm, update.factor).float()


def magnitudes(x: Tensor) -> Tensor:
    """The bits without the sign, which order like the magnitudes; infinity and nan are largest."""
    return x.view(torch.int32) & 0x7FFFFFFF


def pieces(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


# --- Triton ---------------------------------------------------------------------------------------
def selector(update: Update) -> Select:
    """The fastest selection for these tensors."""
    ordinary = all(type(t) in (Tensor, Parameter) for t in (update.g, update.u, update.v, update.u_out, update.v_out))
    if ordinary and update.n <= _MOST and available(update.g.device):
        chosen: Select = loaded().select
        return chosen
    return select


def _check(kernels: ModuleType, device: torch.device) -> str:
    """Compare with the selection in torch once, at run time, because CI has no GPU."""
    source = torch.Generator().manual_seed(0)
    n = 2 * kernels.BLOCK + 77
    g, u, v = (torch.randint(-50, 50, (n,), generator=source).float().to(device) for _ in range(3))  # many are equal
    update = Update(g, u, v, u, v, momentum=0.5, factor=1.0, decay=0.0, norm_limit=None, half=False, k=n // 10)
    results = []
    for selects in (kernels.select, select):
        own = replace(update, u_out=torch.empty_like(u), v_out=torch.empty_like(v))
        indices, top = selects(own)
        results.append(torch.cat([indices.double(), top.double().view(1), own.u_out.double(), own.v_out.double()]))
    same = torch.equal(*results)
    return "" if same else f"the Triton kernel of dgc and torch select different values on {device}: please report this"


_kernels = TritonKernels("fleetx.parts.dgc.triton_kernels", _check)
available, reason, loaded = _kernels.available, _kernels.reason, _kernels.loaded
