"""The kernels of kernels.c, for lists of fp32 tensors in host memory. One call updates all tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from fleetx.base.compiled import Library
from fleetx.optim.foreach import AllSum, LambStep, LarsStep, Tensors

_FIRST, _SECOND = 1, 2  # passes
_SMALL = 1 << 16  # elements of scratch that we can always afford
_library = Library(
    Path(__file__).with_name("_kernels"),
    # The last three arguments are passes, norms and threads.
    fleetx_lars="n" + "p" * 6 + "d" * 4 + "ii" + "ipi",
    fleetx_lamb="n" + "p" * 9 + "pn" + "d" * 4 + "i" + "ipi",
)
available, reason = _library.available, _library.reason


def lars(params: Tensors, grads: Tensors, velocities: Tensors, step: LarsStep, reduce: AllSum | None = None) -> None:
    """One step of LARS. The tensors at each index must be fp32 and have the same shape and the same dense layout.

    If the tensors are this rank's shards, `reduce` must sum the (n, 2) squares of |p| and |g| over the ranks, in place.
    They are 0 for tensors that need no norm.
    """
    counts, decay = _counts(params), np.array(step.decays, np.float64)
    twice = (decay > 0).astype(np.uint8)
    arrays = [counts, _pointers(params), _pointers(grads), _pointers(velocities), decay, twice]
    numbers = (step.lr, step.coeff, step.epsilon, step.momentum, step.nesterov, step.maximize)
    _run(_library.loaded().fleetx_lars, arrays, numbers, params, reduce)


def lamb(
    params: Tensors,
    grads: Tensors,
    firsts: Tensors,
    seconds: Tensors,
    step: LambStep,
    reduce: AllSum | None = None,
) -> None:
    """One step of LAMB. Tensors and `reduce` (here for |p| and |u|) are as in `lars`."""
    beta1, beta2, steps = step.beta1, step.beta2, np.array(step.steps, np.float64)
    arrays = [
        _counts(params),
        *(_pointers(tensors) for tensors in (params, grads, firsts, seconds)),
        np.array(step.decays, np.float64),
        np.array(step.adapts, np.uint8),
        1 / (1 - beta1**steps),
        1 / (1 - beta2**steps),
    ]
    scratch, room = _scratch(int(arrays[0].sum()))
    numbers = (scratch.data_ptr(), room, step.lr, beta1, beta2, step.epsilon, step.maximize)
    _run(_library.loaded().fleetx_lamb, arrays, numbers, params, reduce)


def _run(
    function: Callable[..., int],
    arrays: list[NDArray],
    numbers: tuple[float, ...],
    params: Tensors,
    reduce: AllSum | None,
) -> None:
    n, threads = len(params), torch.get_num_threads()

    def call(passes: int, norms: int | None) -> None:
        if function(n, *(array.ctypes.data for array in arrays), *numbers, passes, norms, threads):
            raise MemoryError(f"out of memory for the list of blocks of {n} tensors")

    if reduce is None:
        call(_FIRST | _SECOND, None)
    else:
        norms = torch.zeros(n, 2, dtype=torch.float64)
        call(_FIRST, norms.data_ptr())
        reduce(norms)
        call(_SECOND, norms.data_ptr())
    # torch does not see that the parameters changed, and must reject a backward through an older graph.
    increment_version(params)


class _Local(threading.local):
    """Per Python thread, because two optimizers may step at the same time."""

    scratch = torch.empty(0)


_local = _Local()


def _scratch(elements: int) -> tuple[Tensor, int]:
    """Memory that is kept between steps, 1/25 of the parameters, and how many elements of it each thread may use."""
    wanted = max(min(elements, _SMALL), elements // 25)
    if _local.scratch.numel() < wanted or _local.scratch.numel() > 2 * wanted + _SMALL:
        _local.scratch = torch.empty(wanted)
    return _local.scratch, _local.scratch.numel() // torch.get_num_threads()


def _counts(tensors: Tensors) -> NDArray:
    return np.fromiter((tensor.numel() for tensor in tensors), np.int64, len(tensors))


def _pointers(tensors: Tensors) -> NDArray:
    return np.fromiter((tensor.data_ptr() for tensor in tensors), np.int64, len(tensors))
