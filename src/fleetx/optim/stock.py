"""LARS and LAMB on the CPU with torch's own kernels, for machines without the compiled ones.

Both need norms of a whole tensor before its first element may change, so each tensor is walked twice. Three things keep
the walks few and short:

- torch's fused SGD and AdamW do the arithmetic, with arguments that make LARS and LAMB of them, as told below.
- What needs scratch goes by flat pieces that stay in the cache, so that only p, g and the state travel to memory.
- A tensor is finished before the next one begins, unless its norms have to be summed over ranks first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

PIECE = 1 << 18  # elements; half of it is slower for the calls, and twice as much is no faster
KEPT = 1 / 32  # of the elements: how much of LAMB's direction may stay from one walk to the next

# A beta that is 1 in fp32, at a step so late that it finds no bias to correct: AdamW whose moments stand still.
STILL = 1 - 2.0**-53
LATE = 2.0**60

# From here on 1 - (1 - x) is x within the rounding of fp32.
SMALLEST = 2.0**-29

Reduce = Callable[[Tensor], object]


@torch.no_grad()
def lars(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    velocities: Sequence[Tensor],
    *,
    lr: float,
    coeff: float,
    decays: Sequence[float],
    epsilon: float,
    momentum: float,
    nesterov: bool,
    maximize: bool,
    reduce: Reduce | None = None,
) -> None:
    """One step of LARS. For each index the tensors have one dense layout, and they are walked in the order of memory.

    d = local (g + decay p), v = momentum v + d, p = p - v; nesterov: p - d - momentum v.
    local = lr coeff |p| / (|g| + decay |p| + epsilon), or lr where decay or a norm is 0.
    If each tensor is only this rank's part of one, `reduce` sums the [n, 2] squares of |p| and |g| over the ranks in
    place. It finds zeros for tensors that need no norm.
    """
    tensors = [[_flat(t) for t in some] for some in zip(params, grads, velocities, strict=True)]
    scratch = torch.empty(min(PIECE, max((p.numel() for p, *_ in tensors), default=0)))

    def rate(decay: float, p_square: float, g_square: float) -> float:
        if not (p_square > 0 and g_square > 0):
            return lr
        p, g = math.sqrt(p_square), math.sqrt(g_square)
        return lr * coeff * p / (g + decay * p + epsilon)

    def move(some: list[list[Tensor]], decay: float, local: float) -> None:
        if momentum and not nesterov and local >= SMALLEST:
            # SGD keeps v = momentum v + (1 - dampening) (g + decay p): a dampening of 1 - local makes it that of LARS.
            _sgd(some, decay, momentum, dampening=1 - local, maximize=maximize)
            return
        signed = -local if maximize else local
        for p, g, v in some:
            _sgd_by_pieces(p, g, v, scratch, signed, local * decay, momentum, nesterov)

    increment_version(params)  # the fused kernels do not tell autograd, which must refuse a graph from before
    for decay in {decay for decay in decays if not decay > 0}:  # these have one rate, so they are one call
        move([some for some, other in zip(tensors, decays, strict=True) if other == decay], decay, lr)
    squares = torch.zeros(len(tensors), 2, dtype=torch.float64)
    for i, (some, decay) in enumerate(zip(tensors, decays, strict=True)):
        if decay > 0:
            both = _square(some[0]), _square(some[1])
            if reduce is None:
                move([some], decay, rate(decay, *both))
            else:
                squares[i] = torch.tensor(both, dtype=torch.float64)
    if reduce is not None:
        reduce(squares)
        for some, decay, (p_square, g_square) in zip(tensors, decays, squares.tolist(), strict=True):
            if decay > 0:
                move([some], decay, rate(decay, p_square, g_square))


@torch.no_grad()
def lamb(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decays: Sequence[float],
    adapts: Sequence[bool],
    steps: Sequence[float],
    maximize: bool,
    reduce: Reduce | None = None,
) -> None:
    """One step of LAMB. For each index the tensors have one dense layout, and they are walked in the order of memory.

    m and v are those of Adam, u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay p, p = p - lr r u.
    r = |p| / |u|, or 1 where a norm is 0 or adapt is False. `reduce` as for `lars`, here for |p| and |u|.
    """
    tensors = [[_flat(t) for t in some] for some in zip(params, grads, firsts, seconds, strict=True)]
    sizes = [p.numel() for p, *_ in tensors]
    scratch = torch.empty(min(max(sizes, default=0), max(PIECE, int(sum(sizes) * KEPT))))
    clocks = {step: torch.tensor(step, dtype=torch.float64) for step in set(steps)}

    def walk(p: Tensor, g: Tensor, m: Tensor, v: Tensor, decay: float, step: float, kept: int) -> tuple[float, float]:
        """Move the moments. The squares of |p| and |u|; the last `kept` elements of -u are in scratch."""
        clock, head = clocks[step], p.numel() - kept
        pieces = [*_pieces(0, head), *_pieces(head, p.numel())]
        p_square = u_square = 0.0
        for a, b in pieces:
            at = max(a - head, 0)
            u = scratch[at : at + b - a]
            piece = p[a:b]
            # AdamW of rate 1 takes m / (...) from what it is given: from -decay p, that leaves -u, rounded but once.
            torch.mul(piece, -decay, out=u)
            _adamw([[u, g[a:b], m[a:b], v[a:b]]], [clock], 1.0, beta1, beta2, 0.0, epsilon, maximize)
            p_square += _square_of_piece(piece)
            u_square += _square_of_piece(u)
        return p_square, u_square

    def move(p: Tensor, m: Tensor, v: Tensor, decay: float, step: float, rate: float, kept: int) -> None:
        """p - rate u: from scratch what was kept, which is still in the cache, and the rest from the moments."""
        head = p.numel() - kept
        if kept:
            p[head:].add_(scratch[:kept], alpha=rate)
        if head:
            # The bias is corrected in the numbers, and a gradient of 0 lets the moments stand to the last bit. Not on p
            # itself with AdamW's own decay: 1 - rate * decay in fp32 is rounded alike in every step, and that adds up.
            second = math.sqrt(1 - beta2**step)
            for a, b in reversed(_pieces(0, head)):  # the last are the likeliest to be in the cache
                u = torch.mul(p[a:b], -decay, out=scratch[: b - a])
                four = [u, zeros[: b - a], m[a:b], v[a:b]]
                _adamw([four], [late], second / (1 - beta1**step), STILL, STILL, 0.0, epsilon * second, False)
                p[a:b].add_(u, alpha=rate)

    def ratio(p_square: float, u_square: float) -> float:
        return math.sqrt(p_square) / math.sqrt(u_square) if p_square > 0 and u_square > 0 else 1.0

    increment_version(params)  # as in `lars`
    late = torch.tensor(LATE, dtype=torch.float64)
    zeros = torch.zeros(min(PIECE, scratch.numel()))
    for decay in {decay for decay, adapt in zip(decays, adapts, strict=True) if not adapt}:  # each is one call
        plain = [i for i, adapt in enumerate(adapts) if not adapt and decays[i] == decay]
        now = [clocks[steps[i]] for i in plain]
        _adamw([tensors[i] for i in plain], now, lr, beta1, beta2, decay, epsilon, maximize)
    squares = torch.zeros(len(tensors), 2, dtype=torch.float64)
    adapted = [i for i, adapt in enumerate(adapts) if adapt]
    for i in adapted:
        p, g, m, v = tensors[i]
        kept = min(p.numel(), scratch.numel()) if reduce is None else 0  # else the next tensors need the scratch
        both = walk(p, g, m, v, decays[i], steps[i], kept)
        if reduce is None:
            move(p, m, v, decays[i], steps[i], lr * ratio(*both), kept)
        else:
            squares[i] = torch.tensor(both, dtype=torch.float64)
    if reduce is not None:
        reduce(squares)
        for i in adapted:
            p, _, m, v = tensors[i]
            move(p, m, v, decays[i], steps[i], lr * ratio(*squares[i].tolist()), 0)


def _flat(t: Tensor) -> Tensor:
    return t.as_strided((t.numel(),), (1,))


def _pieces(start: int, end: int) -> list[tuple[int, int]]:
    return [(a, min(a + PIECE, end)) for a in range(start, end, PIECE)]


def _square(t: Tensor) -> float:
    """The sum of the squares: in fp32 inside of a piece, in float64 over the pieces."""
    return math.fsum(_square_of_piece(x) for x in t.split(PIECE))


def _square_of_piece(x: Tensor) -> float:
    found = torch.dot(x, x).item()
    if 1e-30 < found < 1e38:
        return found
    return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2  # fp32 may have lost it


def _sgd(
    some: list[list[Tensor]], decay: float, momentum: float, *, dampening: float = 0.0, nesterov: bool = False,
    maximize: bool = False,
) -> None:  # fmt: skip
    """torch.optim.SGD of rate 1, for tensors of one decay: p, g and v of each."""
    p, g, v = (list(kind) for kind in zip(*some, strict=True))
    torch._fused_sgd_(
        p, g, v, weight_decay=decay, momentum=momentum, lr=1.0, dampening=dampening, nesterov=nesterov,
        maximize=maximize, is_first_step=False,
    )  # fmt: skip


def _adamw(
    some: list[list[Tensor]], steps: list[Tensor], lr: float, beta1: float, beta2: float, decay: float, epsilon: float,
    maximize: bool,
) -> None:  # fmt: skip
    """torch.optim.AdamW, for tensors of one decay: p, g, m and v of each."""
    p, g, m, v = (list(kind) for kind in zip(*some, strict=True))
    torch._fused_adamw_(
        p, g, m, v, [], steps, lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=epsilon, amsgrad=False,
        maximize=maximize,
    )  # fmt: skip


def _sgd_by_pieces(
    p: Tensor, g: Tensor, v: Tensor, scratch: Tensor, of_g: float, of_p: float, momentum: float, nesterov: bool
) -> None:
    """For what no dampening can express; d = of_g g + of_p p is made in scratch, where SGD finds it as its gradient."""
    for a, b in _pieces(0, p.numel()):
        d = torch.mul(g[a:b], of_g, out=scratch[: b - a]).add_(p[a:b], alpha=of_p)
        if momentum:
            _sgd([[p[a:b], d, v[a:b]]], 0.0, momentum, nesterov=nesterov)
        else:
            v[a:b].copy_(d)
            p[a:b].sub_(d)
