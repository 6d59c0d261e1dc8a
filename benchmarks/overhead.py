"""The overhead of fleetx per training step, against the same techniques written by hand on DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.frame import Run, Sides, benchmark
from fleetx import fleet

PAGE = "overhead.md"
HEADS, CLASSES = 4, 10
CHECKED_UPDATES = 3  # updates that must agree before anything is timed

Update = Callable[[], None]  # from the first forward to zero_grad: k forwards and backwards, and one update


class Transformer(nn.Module):
    def __init__(self, *, depth: int, width: int, recompute: bool):
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.1, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x.mean(1))


@dataclass(frozen=True)
class Case:
    """What to train, and how. `batch` is per rank and forward."""

    depth: int
    width: int
    batch: int
    length: int
    k: int = 1
    recompute: bool = False
    half: bool = False
    updates: int = 1  # per sample
    bucket_mb: float = 32  # fleetx's default, which is Paddle's

    def model(self, *, recompute: bool) -> nn.Module:
        torch.manual_seed(0)
        return Transformer(depth=self.depth, width=self.width, recompute=recompute)

    def batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(1 + rank)
        shape = (self.batch, self.length, self.width)
        return [
            (torch.randn(shape, generator=g), torch.randint(CLASSES, (self.batch,), generator=g)) for _ in range(self.k)
        ]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Fused, so that as little time as possible hides the overhead.
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def with_fleetx(case: Case, rank: int) -> tuple[nn.Module, Update]:
    strategy = fleet.DistributedStrategy()
    strategy.fuse_grad_size_in_MB = case.bucket_mb
    if case.half:
        strategy.amp = True
        strategy.amp_configs = {"dtype": "bfloat16"}
    if case.recompute:
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": [f"blocks.{i}" for i in range(case.depth)]}
    if case.k > 1:
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": case.k}
    made = case.model(recompute=False)
    model, optimizer = fleet.distribute(made, optimizer_of(made), strategy)
    batches = case.batches(rank)

    def update() -> None:
        for x, y in batches:
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return model, update


def by_hand(case: Case, rank: int) -> tuple[nn.Module, Update]:
    model = case.model(recompute=case.recompute)
    ddp = DistributedDataParallel(model, bucket_cap_mb=case.bucket_mb, gradient_as_bucket_view=True)
    optimizer = optimizer_of(model)
    params = list(model.parameters())
    batches = case.batches(rank)

    def forward_backward(x: Tensor, y: Tensor) -> None:
        if case.half:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = ddp(x)
            out = out.float()
        else:
            out = ddp(x)
        cross_entropy(out, y).backward()

    def update() -> None:
        for i, (x, y) in enumerate(batches, start=1):
            with ddp.no_sync() if i < case.k else nullcontext():
                forward_backward(x, y)
        if case.k > 1:
            torch._foreach_div_([p.grad for p in params if p.grad is not None], float(case.k))
        optimizer.step()
        optimizer.zero_grad()

    return model, update


def compare(case: Case, run: Run) -> Sides:
    fleet.init()
    (ours, our_update), (theirs, their_update) = run.both(
        lambda: with_fleetx(case, run.rank), lambda: by_hand(case, run.rank)
    )
    for update in (our_update, their_update):
        torch.manual_seed(2 + run.rank)  # dropout
        for _ in range(CHECKED_UPDATES):
            update()
    assert_same_training(ours, theirs, case.model(recompute=False))
    return run.compare(
        _times(case.updates, our_update),
        _times(case.updates, their_update),
        steps=case.updates * case.k,
        parameters=sum(p.numel() for p in ours.parameters()),
        torch_threads=torch.get_num_threads(),
        autocast_kernels=torch.backends.cpu.get_cpu_capability(),
    )


def assert_same_training(ours: nn.Module, theirs: nn.Module, untrained: nn.Module) -> None:
    """Make sure that both sides do the same."""
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-7)
    before = untrained.state_dict()
    still = [n for n, p in ours.state_dict().items() if torch.equal(p, before[n])]
    assert not still, f"not trained: {still}"


def _times(n: int, update: Update) -> Update:
    def several() -> None:
        for _ in range(n):
            update()

    return several if n > 1 else update


# Realistic steps of about 100 ms. `small` and `small_merged` measure the other extreme.
MERGED = Case(depth=4, width=256, batch=8, length=64, k=4, recompute=True)


@benchmark(ours="fleetx", theirs="by hand", goal=1.02, ranks=2, rounds=80)
def merged(run: Run) -> Sides:
    """An update with amp (bfloat16), recompute and gradient_merge (k = 4), on two ranks."""
    return compare(replace(MERGED, half=True), run)


@benchmark(ours="fleetx", theirs="by hand", goal=1.02, ranks=2, rounds=80)
def merged_fp32(run: Run) -> Sides:
    """The same without amp."""
    return compare(MERGED, run)


@benchmark(ours="fleetx", theirs="raw DDP", goal=1.02, ranks=2, rounds=100)
def plain(run: Run) -> Sides:
    """A step without any strategy, on two ranks."""
    return compare(Case(depth=4, width=256, batch=4, length=64), run)


@benchmark(ours="fleetx", theirs="raw DDP", ranks=2, rounds=100)
def small(run: Run) -> Sides:
    """A step without any strategy, with a model so small that little but the overhead is left."""
    return compare(Case(depth=2, width=16, batch=2, length=4, updates=4), run)


@benchmark(ours="fleetx", theirs="by hand", ranks=2, rounds=100)
def small_merged(run: Run) -> Sides:
    """The same small model with amp, recompute and gradient_merge (k = 4)."""
    return compare(Case(depth=2, width=16, batch=2, length=4, k=4, recompute=True, half=True), run)
