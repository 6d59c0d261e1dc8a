"""The cost and the gain of deep gradient compression: encoding against pure memory traffic and against torch.topk.

The memory traffic is that of the stream in `optimizers.py`, sized to move 20 bytes per element of the gradient: g, u
and v are read, u and v are written. The numbers in names are numbers of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.frame import CannotRunError, Run, Sides, benchmark

ELEMENTS = 25_000_000
BYTES = 20  # per element
SPARSITY = 0.999
ENTROPY = 16 + 11.4  # bits per value: fp16, and the information in an index at sparsity 0.999


def encoder(elements: int, sparsity: float = SPARSITY) -> Callable[[], Any]:
    """A step of the strategy with Gaussian gradients, and u and v after a few warm-up steps."""
    import torch

    from fleetx.parts.dgc import codec, native

    if not native.available():
        raise CannotRunError(native.reason())
    torch.manual_seed(0)
    gradients = [torch.randn(elements) for _ in range(2)]
    u, v = torch.zeros(elements), torch.zeros(elements)
    turn = iter(range(10**9))

    def encode() -> torch.Tensor:
        g = gradients[next(turn) % 2]
        return codec.encode(g, u, v, momentum=0.9, factor=1.0, sparsity=sparsity, half=True, backend=native)

    for _ in range(5):
        encode()
    return encode


def against_stream(run: Run, sparsity: float = SPARSITY) -> Sides:
    import torch

    from benchmarks.optimizer_steps.stream import BYTES as THEIRS
    from benchmarks.optimizer_steps.stream import stream

    ours, theirs = run.both(lambda: encoder(ELEMENTS, sparsity), lambda: stream(ELEMENTS * BYTES // THEIRS))
    sides = run.compare(ours, theirs, elements=ELEMENTS, sparsity=sparsity, threads=torch.get_num_threads())
    sides.notes["stream_gb_per_second"] = BYTES * ELEMENTS / min(sides.theirs) / 1e9
    return sides


@benchmark(ours="encode", theirs="stream", goal=4.0, rounds=20, starts=2)
def encode_1(run: Run) -> Sides:
    """Encode 25 million elements at sparsity 0.999, against the stream of 20 bytes per element, one thread."""
    return against_stream(run)


@benchmark(ours="encode", theirs="stream", goal=4.0, rounds=20, starts=2, threads=2)
def encode_2(run: Run) -> Sides:
    """The same with two threads."""
    return against_stream(run)


@benchmark(ours="encode", theirs="stream", rounds=6, starts=1)
def encode_warm_up(run: Run) -> Sides:
    """The same at sparsity 0.75, as at the start of a ramp-up, one thread."""
    return against_stream(run, 0.75)


@benchmark(ours="encode", theirs="topk", goal=0.2, rounds=6, starts=1)
def topk(run: Run) -> Sides:
    """Encode, against torch.topk of |v|, which is only part of it: 25 million elements at sparsity 0.999."""
    import torch

    v = torch.randn(ELEMENTS)
    k = round(ELEMENTS * (1 - SPARSITY))
    return run.compare(encoder(ELEMENTS), lambda: v.abs().topk(k, sorted=False), elements=ELEMENTS)


def size(elements: int) -> Sides:
    payload = encoder(elements)()
    values = round(elements * (1 - SPARSITY))
    return Sides([payload.numel() * 8.0], [values * ENTROPY], unit="bit", notes={"elements": elements})


@benchmark(ours="payload", theirs="entropy", goal=1.2, rounds=1, starts=1)
def bits(run: Run) -> Sides:
    """Bits of a payload of 25 million elements at sparsity 0.999, against its information content, 27.4 per value."""
    return size(ELEMENTS)


@benchmark(ours="payload", theirs="entropy", goal=1.2, rounds=1, starts=1)
def bits_small(run: Run) -> Sides:
    """The same with a million elements."""
    return size(1_000_000)
