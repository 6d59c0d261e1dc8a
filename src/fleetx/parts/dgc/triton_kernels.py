"""Updates u and v and selects the k largest in Triton, with the same indices as selection.py.

The k-th largest magnitude is found from its highest bits down, by three histograms of 11, 10 and 10 bits. The number
of elements still to be found stays on the device. Programs then count what they will select, and write the indices in
order, each after those of the programs before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from fleetx.base.triton_kernels import OPTIONS, on
from fleetx.parts.dgc.payload import Update
from fleetx.parts.dgc.selection import limited

BLOCK = 4096  # elements per program
_BITS = ((20, 2048), (10, 1024), (0, 1024))  # the lowest bit of each histogram, and its bins


# --- device -----------------------------------------------------------------------------------------
@triton.jit
def advance_kernel(
    g, u, v, p, u_out, v_out, factor, tops, bins, n, momentum, decay, decays: tl.constexpr, shift: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The new u and v, the largest |v| of each program, and the histogram of the highest bits."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    scale = tl.load(factor).to(tl.float32)
    x = momentum * tl.load(u + at, mask=inside, other=0.0) + scale * tl.load(g + at, mask=inside, other=0.0)
    if decays:
        x += decay * tl.load(p + at, mask=inside, other=0.0)
    y = tl.load(v + at, mask=inside, other=0.0) + x
    tl.store(u_out + at, x, mask=inside)
    tl.store(v_out + at, y, mask=inside)
    bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(tops + program, tl.max(tl.where(inside, bits, 0), 0))
    counts = tl.histogram(bits >> shift, width, mask=inside)
    tl.atomic_add(bins + tl.arange(0, width), counts, mask=counts > 0)


@triton.jit
def tally_kernel(v, bins, state, n, shift: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    """The histogram of the next bits of the magnitudes whose higher bits equal those of the k-th largest."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    bits = tl.load(v + at, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    number = (bits - tl.load(state)) >> shift
    wanted = inside & (number >= 0) & (number < width)
    counts = tl.histogram(tl.where(wanted, number, 0), width, mask=wanted)
    tl.atomic_add(bins + tl.arange(0, width), counts, mask=counts > 0)


@triton.jit
def pick_kernel(bins, state, shift: tl.constexpr, width: tl.constexpr):
    """state: the bits of the k-th largest that are known so far, and how many elements with these bits are wanted."""
    numbers = tl.arange(0, width)
    counts = tl.load(bins + numbers)
    wanted = tl.load(state + 1)
    at_least = tl.cumsum(counts, 0, reverse=True)
    chosen = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
    tl.store(state, tl.load(state) + (chosen << shift))
    tl.store(state + 1, wanted - tl.sum(tl.where(numbers > chosen, counts, 0), 0))
    tl.store(bins + numbers, tl.zeros([width], tl.int32))


@triton.jit
def count_kernel(v, state, counts, n, block: tl.constexpr):
    """How many of each program's elements are above the k-th largest, and how many equal it."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    bits = tl.load(v + at, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    low = tl.load(state)
    tl.store(counts + 2 * program, tl.sum((inside & (bits > low)).to(tl.int32), 0))
    tl.store(counts + 2 * program + 1, tl.sum((inside & (bits == low)).to(tl.int32), 0))


@triton.jit
def collect_kernel(v, state, before, indices, n, block: tl.constexpr):
    """before: for each program, the sum of the counts of the programs before it."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    bits = tl.load(v + at, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    low, ties = tl.load(state), tl.load(state + 1)
    larger, equal = tl.load(before + 2 * program).to(tl.int32), tl.load(before + 2 * program + 1).to(tl.int32)
    tied = (inside & (bits == low)).to(tl.int32)
    first = equal + tl.cumsum(tied, 0) - tied < ties  # of equal ones, those with the lowest indices
    chosen = ((inside & (bits > low)) | ((tied > 0) & first)).to(tl.int32)
    place = larger + tl.minimum(equal, ties) + tl.cumsum(chosen, 0) - chosen
    tl.store(indices + place, at, mask=chosen > 0)


# --- host -------------------------------------------------------------------------------------------
def select(update: Update) -> tuple[Tensor, Tensor]:
    n, device = update.n, update.g.device
    programs = -(-n // BLOCK)
    factor = limited(update)
    if not isinstance(factor, Tensor):
        factor = torch.full((), factor, dtype=torch.float64, device=device)
    tops = torch.empty(programs, dtype=torch.int32, device=device)
    bins = torch.zeros(max(width for _, width in _BITS), dtype=torch.int32, device=device)
    state = torch.zeros(2, dtype=torch.int32, device=device)
    state[1].fill_(update.k)
    counts = torch.empty(programs, 2, dtype=torch.int32, device=device)
    indices = torch.empty(update.k, dtype=torch.int64, device=device)
    p = update.g if update.p is None else update.p  # not read without decay
    tensors = (update.g, update.u, update.v, p, update.u_out, update.v_out)
    sizes = {"block": BLOCK, "num_warps": 8, **OPTIONS}
    with on(device):
        for shift, width in _BITS:
            if shift == _BITS[0][0]:
                advance_kernel[(programs,)](
                    *tensors, factor, tops, bins, n, float(update.momentum), float(update.decay),
                    decays=update.p is not None, shift=shift, width=width, **sizes,
                )  # fmt: skip
            else:
                tally_kernel[(programs,)](
                    update.v_out, bins, state, n, shift=shift, width=width, block=BLOCK, num_warps=8
                )
            pick_kernel[(1,)](bins, state, shift=shift, width=width, num_warps=4, **OPTIONS)
        count_kernel[(programs,)](update.v_out, state, counts, n, **sizes)
        before = counts.cumsum(0) - counts
        collect_kernel[(programs,)](update.v_out, state, before, indices, n, **sizes)
    increment_version([update.u_out, update.v_out])  # torch does not see the change
    return indices, tops.amax()
