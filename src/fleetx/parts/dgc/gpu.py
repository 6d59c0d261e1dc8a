"""Whether the Triton kernels select on a device, and the check of what they select there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import Parameter

from fleetx.base.triton_kernels import TritonKernels
from fleetx.parts.dgc import selection
from fleetx.parts.dgc.payload import Update

Select = Callable[[Update], tuple[Tensor, Tensor]]
_MOST = 2**31 - 1  # elements that the kernels can count


def selector(update: Update) -> Select:
    """The fastest selection for these tensors."""
    ordinary = all(type(t) in (Tensor, Parameter) for t in (update.g, update.u, update.v, update.u_out, update.v_out))
    if ordinary and update.n <= _MOST and available(update.g.device):
        chosen: Select = loaded().select
        return chosen
    return selection.select


def _check(kernels: ModuleType, device: torch.device) -> str:
    """Compare with the selection in torch, once: CI has no GPU on which it could have done this."""
    source = torch.Generator().manual_seed(0)
    n = 2 * kernels.BLOCK + 77
    g, u, v = (torch.randint(-50, 50, (n,), generator=source).float().to(device) for _ in range(3))  # many are equal
    update = Update(g, u, v, u, v, momentum=0.5, factor=1.0, decay=0.0, norm_limit=None, half=False, k=n // 10)
    results = []
    for select in (kernels.select, selection.select):
        own = replace(update, u_out=torch.empty_like(u), v_out=torch.empty_like(v))
        indices, top = select(own)
        results.append(torch.cat([indices.double(), top.double().view(1), own.u_out.double(), own.v_out.double()]))
    same = torch.equal(*results)
    return "" if same else f"the Triton kernel of dgc selects other values than torch on {device}: please report this"


_kernels = TritonKernels("fleetx.parts.dgc.triton_kernels", _check)
available, reason, loaded = _kernels.available, _kernels.reason, _kernels.loaded
