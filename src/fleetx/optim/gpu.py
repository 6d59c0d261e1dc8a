"""Whether the Triton kernels run on a device, and the check of what they compute there."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from fleetx.base.triton_kernels import TritonKernels
from fleetx.optim import foreach

_LARS = {"lr": 0.1, "coeff": 0.02, "epsilon": 1e-9, "momentum": 0.9, "nesterov": False, "maximize": False}
_LAMB = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6, "maximize": False}


@torch.no_grad()
def _check(kernels: ModuleType, device: torch.device) -> str:
    """Compare with the foreach functions, once: CI has no GPU on which it could have done this."""
    sizes, decays = (1, 1000, kernels.CHUNK + 77), [0.01, 0.0, 0.3]
    for name, kinds, settings in (
        ("lars", 3, _LARS | {"decays": decays}),
        ("lamb", 4, _LAMB | {"decays": decays, "adapts": [True, False, True], "steps": [1, 2, 30]}),
    ):
        found, expected = _tensors(sizes, kinds, device), _tensors(sizes, kinds, device)
        getattr(kernels, name)(*found, **settings)
        getattr(foreach, name)(*expected, **settings)
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
