"""Whether the Triton kernels run on a device, and the check of what they compute there."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from fleetx.base.triton_kernels import TritonKernels
from fleetx.optim import foreach


@torch.no_grad()
def _check(kernels: ModuleType, device: torch.device) -> str:
    """Compare with the foreach functions, once: CI has no GPU on which it could have done this."""
    sizes, decays = (1, 1000, kernels.CHUNK + 77), [0.01, 0.0, 0.3]
    for name, kinds, step in (
        ("lars", 3, foreach.LarsStep(0.1, 0.02, decays, 1e-9, 0.9, nesterov=False, maximize=False)),
        ("lamb", 4, foreach.LambStep(0.01, 0.9, 0.99, 1e-6, decays, [True, False, True], [1, 2, 30], maximize=False)),
    ):
        found, expected = _tensors(sizes, kinds, device), _tensors(sizes, kinds, device)
        getattr(kernels, name)(*found, step)
        getattr(foreach, name)(*expected, step)
        joined = [torch.cat([t for tensors in lists for t in tensors]) for lists in (found, expected)]
        error = (joined[0] - joined[1]).abs().max().item()
        if not error <= 1e-4:
            return f"the Triton kernel of {name} differs from torch by {error:g} on {device}: please report this"
    return ""


def _tensors(sizes: tuple[int, ...], kinds: int, device: torch.device) -> list[list[Tensor]]:
    source = torch.Generator().manual_seed(0)
    return [[torch.rand(n, generator=source).to(device) for n in sizes] for _ in range(kinds)]


_kernels = TritonKernels("fleetx.optim.triton_kernels", _check)
available, reason, loaded = _kernels.available, _kernels.reason, _kernels.loaded
