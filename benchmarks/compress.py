"""What deep gradient compression costs and saves: encode in units of the memory it must move, and against torch.topk.

The unit is the stream of `optimizers.py`, over as many elements as make it move 20 bytes for each of the gradient: g, u
and v are read, u and v written. A name says what is compared and the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.frame import CannotRunError, Run, Sides, benchmark

ELEMENTS = 25_000_000
BYTES = 20  # an element
SPARSITY = 0.999
ENTROPY = 16 + 11.4  # bits a value: fp16, and what an index among a thousand tells


def encoder(elements: int, sparsity: float = SPARSITY) -> Callable[[], Any]:
    """A step as the strategy makes it: Gaussian gradients, u and v in the state that they come to."""
    import torch

    from fleetx.parts.dgc import native

    if not native.available():
        raise CannotRunError(native.reason())
    torch.manual_seed(0)
    gradients = [torch.randn(elements) for _ in range(2)]
    u, v = torch.zeros(elements), torch.zeros(elements)
    turn = iter(range(10**9))

    def encode() -> torch.Tensor:
        g = gradients[next(turn) % 2]
        return native.encode(g, u, v, momentum=0.9, factor=1.0, sparsity=sparsity, half=True)

    for _ in range(5):
        encode()
    return encode


def against_stream(run: Run, sparsity: float = SPARSITY) -> Sides:
    import torch

    from benchmarks.optimizer_steps.stream import BYTES as THEIRS
    from benchmarks.optimizer_steps.stream import stream

    ours, walk = run.both(lambda: encoder(ELEMENTS, sparsity), lambda: stream(ELEMENTS * BYTES // THEIRS))
    found = run.compare(ours, walk, elements=ELEMENTS, sparsity=sparsity, threads=torch.get_num_threads())
    found.notes["stream_gb_per_second"] = BYTES * ELEMENTS / min(found.theirs) / 1e9
    return found


@benchmark(ours="encode", theirs="stream", goal=4.0, rounds=20, starts=2)
def encode_1(run: Run) -> Sides:
    """Encode 25 million elements at 0.999 against the stream of 20 bytes an element, one thread."""
    return against_stream(run)


@benchmark(ours="encode", theirs="stream", goal=4.0, rounds=20, starts=2, threads=2)
def encode_2(run: Run) -> Sides:
    """The same on two threads."""
    return against_stream(run)


@benchmark(ours="encode", theirs="stream", rounds=6, starts=1)
def encode_warm_up(run: Run) -> Sides:
    """The same at 0.75, as in the first steps of a ramp, one thread."""
    return against_stream(run, 0.75)


@benchmark(ours="encode", theirs="topk", goal=0.2, rounds=6, starts=1)
def topk(run: Run) -> Sides:
    """Encode against torch.topk of |v| alone, which is but a part of the same: 25 million elements at 0.999."""
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
    """The bits of a payload of 25 million elements at 0.999 against those of its content, 27.4 a value."""
    return size(ELEMENTS)


@benchmark(ours="payload", theirs="entropy", goal=1.2, rounds=1, starts=1)
def bits_small(run: Run) -> Sides:
    """The same of a million elements."""
    return size(1_000_000)
