"""LARS and LAMB with torch's foreach functions: for accelerators, and for what the compiled CPU kernels cannot take.

Both optimizers need the norms of a whole tensor before its first element may change, so each tensor is visited twice.
Tensors are processed in blocks (several small tensors, or one large tensor in pieces) to keep temporaries small and, on
a CPU, in the cache. Nothing here waits for the device. All arithmetic is in fp32 or wider.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from fleetx.base import seams

Tensors = list[Tensor] | tuple[Tensor, ...]
AllSum = Callable[[Tensor], None]

_BLOCK = 1 << 24  # elements
_CPU_BLOCK = 1 << 18
_SMALLEST_RATE = 2.0**-29  # below it, 1 - (1 - rate) differs from the rate in fp32


@dataclass(frozen=True)
class LarsStep:
    """The scalars of a LARS step, for all implementations."""

    lr: float
    coeff: float
    decays: Sequence[float]  # by tensor
    epsilon: float
    momentum: float
    nesterov: bool
    maximize: bool


@dataclass(frozen=True)
class LambStep:
    """The same for LAMB. `steps` counts this one too."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    decays: Sequence[float]  # these three by tensor
    adapts: Sequence[bool]
    steps: Sequence[float]
    maximize: bool


def lars(params: Tensors, grads: Tensors, velocities: Tensors, step: LarsStep, reduce: AllSum | None = None) -> None:
    blocks = _Blocks(params, grads, velocities)

    def first(positions: range, ps: Tensors, gs: Tensors, vs: Tensors) -> tuple[Tensor, None]:
        return blocks.squares(ps, gs), None

    def rates(positions: range, squares: Tensor) -> Tensor:
        p_norms, g_norms = squares.sqrt().unbind(1)
        decay = _constants([step.decays[i] for i in positions], squares.dtype, squares)
        ratios = step.lr * step.coeff * p_norms / (g_norms + decay * p_norms + step.epsilon)
        return torch.where((decay > 0) & (p_norms > 0) & (g_norms > 0), ratios, step.lr)

    def second(positions: range, rates: Tensor, kept: None, ps: Tensors, gs: Tensors, vs: Tensors) -> None:
        if blocks.plain and step.momentum and not step.nesterov and rates.min() >= _SMALLEST_RATE:
            # SGD computes v = momentum v + (1 - dampening) (g + decay p), which is LARS if dampening is 1 - rate.
            for p, g, v, i, rate in zip(ps, gs, vs, positions, rates.tolist(), strict=True):
                seams.fused_sgd_(
                    [p], [g], [v], lr=1.0, momentum=step.momentum, dampening=1 - rate, weight_decay=step.decays[i],
                    nesterov=False, maximize=step.maximize, is_first_step=False,
                )  # fmt: skip
            return
        ds = blocks.copies(0, ps, vs)
        seams.foreach_mul_(ds, [step.decays[i] for i in positions])
        seams.foreach_add_(ds, _like(gs, ds), alpha=-1.0 if step.maximize else 1.0)
        seams.foreach_mul_(ds, _like(rates.unbind(), ds))
        seams.foreach_mul_(vs, step.momentum)
        seams.foreach_add_(vs, ds)
        if step.nesterov:
            seams.foreach_add_(ds, vs, alpha=step.momentum)
        _subtract(ps, ds if step.nesterov else vs)

    blocks.run(first, rates, second, reduce)


def lamb(
    params: Tensors,
    grads: Tensors,
    firsts: Tensors,
    seconds: Tensors,
    step: LambStep,
    reduce: AllSum | None = None,
) -> None:
    blocks = _Blocks(params, grads, firsts, seconds)
    beta1, beta2, decays, steps = step.beta1, step.beta2, step.decays, step.steps

    def first(positions: range, ps: Tensors, gs: Tensors, ms: Tensors, vs: Tensors) -> tuple[Tensor, Tensors]:
        if blocks.plain:
            # AdamW with lr=1 subtracts Adam's direction from what it is given: -decay p becomes -u.
            us = blocks.copies(0, ps, ms)
            seams.foreach_mul_(us, [-decays[i] for i in positions])
            seams.fused_adamw_(
                us, gs, ms, vs, [], [torch.tensor(steps[i]) for i in positions], lr=1.0, beta1=beta1, beta2=beta2,
                weight_decay=0.0, eps=step.epsilon, amsgrad=False, maximize=step.maximize,
            )  # fmt: skip
        else:
            gs = _like(gs, ms)
            seams.foreach_mul_(ms, beta1)
            seams.foreach_add_(ms, gs, alpha=(-1.0 if step.maximize else 1.0) * (1 - beta1))
            seams.foreach_mul_(vs, beta2)
            seams.foreach_addcmul_(vs, gs, gs, 1 - beta2)
            us = negated(positions, ps, ms, vs)
        return blocks.squares(ps, us), us

    def negated(positions: range, ps: Tensors, ms: Tensors, vs: Tensors) -> Tensors:
        """-u, from the new moments."""
        roots = blocks.copies(1, vs, vs)
        seams.foreach_div_(roots, [1 - beta2 ** steps[i] for i in positions])
        seams.foreach_sqrt_(roots)
        seams.foreach_add_(roots, step.epsilon)
        us = blocks.copies(0, ps, ms)
        seams.foreach_mul_(us, [-decays[i] for i in positions])
        seams.foreach_addcdiv_(us, ms, roots, [-1 / (1 - beta1 ** steps[i]) for i in positions])
        return us

    def rates(positions: range, squares: Tensor) -> Tensor:
        p_norms, u_norms = squares.sqrt().unbind(1)
        adapt = _constants([step.adapts[i] for i in positions], torch.bool, squares)
        return -step.lr * torch.where(adapt & (p_norms > 0) & (u_norms > 0), p_norms / u_norms, 1.0)

    def second(
        positions: range, rates: Tensor, kept: Tensors | None, ps: Tensors, gs: Tensors, ms: Tensors, vs: Tensors
    ) -> None:
        us = negated(positions, ps, ms, vs) if kept is None else kept
        seams.foreach_mul_(us, _like(rates.unbind(), us))
        _subtract(ps, us)

    blocks.run(first, rates, second, reduce)


class _Blocks:
    """The tensors of a step in blocks, and memory for their temporaries."""

    def __init__(self, *lists: Tensors):
        self.plain = all(is_plain(tensors) and tensors[0].dim() == 1 for tensors in zip(*lists, strict=True))
        self._lists = lists
        self._limit = _CPU_BLOCK if lists[0] and lists[0][0].device.type == "cpu" else _BLOCK
        self._memory: dict[int, Tensor] = {}

    def run(
        self,
        first: Callable[..., tuple[Tensor, Any]],
        rates: Callable[[range, Tensor], Tensor],
        second: Callable[..., None],
        reduce: AllSum | None,
    ) -> None:
        """Call `first` and then `second` for every piece.

        `first` returns squared norms, and a result that `second` gets if no other piece has overwritten it since.
        """
        waiting = []
        for positions, pieces in self._split():
            total: Any = 0
            kept = None
            for piece in pieces:
                squares, kept = first(positions, *piece)
                total = total + squares
            if reduce is None:
                local = rates(positions, total)
                for piece in reversed(pieces):
                    second(positions, local, kept, *piece)
                    kept = None
            else:
                waiting.append((positions, pieces, total))
        if reduce is not None and waiting:
            reduce(totals := torch.cat([total for *_, total in waiting]))
            for positions, pieces, _ in waiting:
                local = rates(positions, totals[positions.start : positions.stop])
                for piece in pieces:
                    second(positions, local, None, *piece)
        if self.plain:
            increment_version(self._lists[0])  # which the fused kernels leave to their callers

    def _split(self) -> Iterator[tuple[range, list[list[Tensors]]]]:
        """Positions of the tensors in a block, and its pieces: one, or several of a single large tensor."""
        params = self._lists[0]
        start = size = 0
        for i, p in enumerate(params):
            if i > start and size + p.numel() > self._limit:
                yield range(start, i), [[values[start:i] for values in self._lists]]
                start, size = i, 0
            size += p.numel()
            if size > self._limit:
                rows = max(1, self._limit * len(p) // size)
                pieces = zip(*(values[i].split(rows) for values in self._lists), strict=True)
                yield range(i, i + 1), [[[t] for t in piece] for piece in pieces]
                start, size = i + 1, 0
        if start < len(params):
            yield range(start, len(params)), [[values[start:] for values in self._lists]]

    def copies(self, key: int, tensors: Tensors, like: Tensors) -> Tensors:
        """Copies in the dtype of `like`. On a CPU, reuses memory: page faults would cost more than the arithmetic."""
        if self.plain:
            sizes = [t.numel() for t in tensors]
            if key not in self._memory:
                self._memory[key] = torch.empty(self._limit)
            copies: Tensors = self._memory[key][: sum(sizes)].split(sizes)
        else:
            copies = [torch.empty_like(t, dtype=other.dtype) for t, other in zip(tensors, like, strict=True)]
        seams.foreach_copy_(copies, tensors)
        return copies

    def squares(self, *lists: Tensors) -> Tensor:
        """Squared norms in fp64: a row per tensor, a column per list."""
        if self.plain:
            columns = [torch.stack([_square(t) for t in tensors]) for tensors in lists]
        else:
            # fp64 is slow on accelerators, so there it is only used for fp64 parameters.
            exact = lists[0][0].device.type == "cpu" or lists[0][0].dtype is torch.float64
            dtype = torch.float64 if exact else torch.float32
            columns = [torch.stack(seams.foreach_norm(tensors, 2, dtype=dtype)).double().square() for tensors in lists]
        return torch.stack(columns, dim=1)


def is_plain(tensors: tuple[Tensor, ...]) -> bool:
    """Whether these are ordinary contiguous fp32 tensors in host memory, of one size. Called per parameter and step."""
    n = tensors[0].numel()
    for t in tensors:
        if (type(t) is not Tensor and type(t) is not Parameter) or t.dtype is not torch.float32 or not t.is_cpu:
            return False
        if not t.is_contiguous() or t.numel() != n or t.is_neg() or seams.is_zerotensor(t):
            return False
    return True


def _square(t: Tensor) -> Tensor:
    square = t.dot(t)
    if 1e-30 < square < 1e38:
        return square.double()
    return torch.linalg.vector_norm(t, dtype=torch.float64).square()  # fp32 may have underflowed or overflowed


def _constants(values: list[float] | list[bool], dtype: torch.dtype, beside: Tensor) -> Tensor:
    """A tensor on the device of `beside`. Sending it makes the host wait for the device, so it is sent only once."""
    if beside.device.type == "cpu" or hasattr(beside, "fake_mode"):  # a fake tensor must not be kept
        return torch.tensor(values, dtype=dtype, device=beside.device)
    return _sent(tuple(values), dtype, beside.device)


@functools.lru_cache(maxsize=256)
def _sent(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _like(tensors: Tensors, others: Tensors) -> Tensors:
    return [t.to(other.dtype) for t, other in zip(tensors, others, strict=True)]


def _subtract(params: Tensors, steps: Tensors) -> None:
    """Rounds only the result, if the parameters are narrower than the steps."""
    if params[0].dtype is steps[0].dtype:
        seams.foreach_sub_(params, steps)
    else:
        seams.foreach_copy_(params, seams.foreach_sub(_like(params, steps), steps))
