"""The time of a step of Muon on BERT-base's shapes, one thread per rank; a step takes seconds, so there are few rounds.

The unit of `stream` is that of optimizers.py: 28 bytes of memory traffic per parameter. torch's Muon always
orthogonalizes in bfloat16, and every rank orthogonalizes every matrix. fleetx does it in float32 unless `bf16` is set,
and divides the matrices between the ranks.
"""

from __future__ import annotations

from benchmarks.frame import Run, Sides, benchmark
from benchmarks.optimizers import in_units

PAGE = "muon.md"


def against_torch(run: Run, optimizer: str) -> Sides:
    from benchmarks.optimizer_steps import sides
    from benchmarks.optimizer_steps.models import shapes

    (_, a), (_, b) = run.both(
        lambda: sides.muon(optimizer, shapes("bert")), lambda: sides.torch_muon(optimizer, shapes("bert"))
    )
    return run.compare(a.step, b.step, warm_up=1)


@benchmark(ours="fleetx", theirs="stream", rounds=2, starts=1)
def stream(run: Run) -> Sides:
    """Muon on one rank, in units of the stream."""
    return in_units(run, "muon", "muon", "bert", 1)


@benchmark(ours="fleetx", theirs="torch", rounds=2, starts=1)
def torch_1(run: Run) -> Sides:
    """Muon in float32 against torch's Muon (bfloat16) with its AdamW, one rank."""
    return against_torch(run, "muon")


@benchmark(ours="fleetx", theirs="torch", rounds=2, starts=1, ranks=2)
def torch_2(run: Run) -> Sides:
    """The same on two ranks."""
    return against_torch(run, "muon")


@benchmark(ours="fleetx", theirs="torch", rounds=1, starts=1)
def bf16_torch_1(run: Run) -> Sides:
    """Both in bfloat16, one rank."""
    return against_torch(run, "muon_bf16")
