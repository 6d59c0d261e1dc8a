"""Measures the cluster and the model. Times come from real steps of a few sizes, on all ranks at once in child
processes; bytes come from running on tensors without data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from fleetx.base.module_names import named_modules
from fleetx.base.trees import loss_by
from fleetx.comm import averaging
from fleetx.comm.paths import inside_hosts
from fleetx.comm.roles import ProcessInfo
from fleetx.comm.world import World
from fleetx.engine.engine import Engine
from fleetx.errors import UsageError
from fleetx.measure.block_profile import now
from fleetx.measure.child import Answer
from fleetx.measure.fake_step import estimate
from fleetx.parts.pipeline.cut_points import find_cut_points
from fleetx.parts.recompute import budget
from fleetx.parts.sharding import fsdp
from fleetx.planner import link_benchmark
from fleetx.planner.candidates import budget_of
from fleetx.planner.children import count_on_rank_0, on_all_ranks
from fleetx.planner.model_profile import BlockShare, ForwardProfile, LinearFit, ModelProfile, forward_key
from fleetx.planner.workload import Workload
from fleetx.strategy.compose import compose
from fleetx.strategy.cost_model import Cluster
from fleetx.strategy.part import Part
from fleetx.strategy.stage import Stage

HALVES = (torch.float16, torch.bfloat16)
SEGMENT = 32 << 20  # bytes: the default segment size of sharding
MUCH_SLOWER = 1.5  # a variant of the forward that takes this many times as long is not measured further
SHORT = 1.0  # seconds: shorter steps are run twice, and the faster one counts
Times = Sequence[tuple[int, float, float]]  # samples, seconds of forward, seconds of backward


# --- the cluster ----------------------------------------------------------------------------------
def measure_cluster(world: World, *, memory: int | None, global_batch: int | None) -> Cluster:
    hosts = world.hosts()
    inner, outer = link_benchmark.inner_and_outer(world, hosts)
    return Cluster(
        ranks=world.size,
        ranks_per_host=inside_hosts(hosts) or 1,  # hosts of different sizes cannot be used as groups
        all_reduce=link_benchmark.all_reduce(world),
        all_gather=link_benchmark.all_gather(world),
        reduce_scatter=link_benchmark.reduce_scatter(world),
        inner=inner,
        outer=outer,
        bandwidth=link_benchmark.bandwidth(world),
        memory=memory if memory is not None else _memory_per_rank(world, hosts.count(hosts[world.rank])),
        all_reduce_16bit={str(d).removeprefix("torch."): link_benchmark.all_reduce(world, d) for d in HALVES},
        device=world.device.type,
        global_batch=global_batch,
    )


def _memory_per_rank(world: World, ranks_here: int) -> int:
    """Bytes that every rank can use. On a CPU, a tenth of the machine's memory is left for everything else."""
    if world.device.type == "cuda":
        mine = torch.cuda.mem_get_info(world.device)[0]
    else:
        mine = int(0.9 * host_memory() / ranks_here)
    return -int(world.largest(-mine))


def host_memory() -> int:
    """The memory of this machine in bytes, or the limit of this process's cgroup if that is lower."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    mine = PurePosixPath(next((line.split("::")[1] for line in lines if line.startswith("0::")), "/"))
    files = [f"/sys/fs/cgroup/{folder}/memory.max" for folder in (mine, *mine.parents)]  # each may have a limit
    for file in (*files, "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(file).read_text()))
        except (OSError, ValueError):  # missing, or "max"
            continue
    return min(limits)


# --- the model ------------------------------------------------------------------------------------
def measure_model(
    workload: Workload, base: Sequence[Part], variants: Sequence[Sequence[Part]], world: World, *,
    largest: int, seconds: float,
) -> ModelProfile:  # fmt: skip
    """Profile the model with the user's own parts (`base`), and with each of `variants`, which change the forward.

    largest: the most samples that a rank may be fed per step. The peak curves upwards where activations outgrow
    everything else, so its line goes through the smallest size and this one: in between, it errs on the high side.
    """
    sizes = _sizes(workload.samples)
    ends = sizes[0], max(largest, 2 * sizes[0])
    timed = _timed(workload, base, sizes, world, seconds)
    if timed.error:
        raise UsageError(f"the model failed on the sample: {timed.error}")
    times = timed.value["times"]
    counted = count_on_rank_0(world, lambda: asdict(_count(workload, base, ends)))
    profile = ModelProfile.parse(counted | {"update": timed.value["update"]})
    declared = replace(_fitted(times, profile.declared.peak), cast_bytes=profile.declared.cast_bytes)
    found = {forward_key(parts): _variant(workload, parts, times, ends, world, seconds) for parts in variants}
    return replace(profile, declared=declared, variants=found)


def _sizes(samples: int) -> list[int]:
    least = min(2, samples)  # batch norm fails on a single sample
    return sorted({max(samples // 4, least), max(samples // 2, least), samples})


def _fitted(times: Times, peak: LinearFit) -> ForwardProfile:
    forward = LinearFit.through([(n, seconds) for n, seconds, _ in times])
    return ForwardProfile(forward, LinearFit.through([(n, seconds) for n, _, seconds in times]), peak)


def _variant(
    workload: Workload, parts: Sequence[Part], base: Times, ends: tuple[int, int], world: World, seconds: float
) -> ForwardProfile:
    """Measured at the smallest and the largest size; only at the smallest if it is much slower there."""
    sizes = [int(n) for n, _, _ in base]
    base_seconds = sum(base[0][1:])
    first = _timed(workload, parts, sizes[:1], world, min(seconds, 5 + 20 * base_seconds))
    if first.error:
        return ForwardProfile(error=first.error)
    times = first.value["times"]
    if sum(times[0][1:]) < MUCH_SLOWER * base_seconds and len(sizes) > 1:
        last = _timed(workload, parts, sizes[-1:], world, seconds)
        times = times + last.value["times"] if not last.error else times
    peak, plain_base, border_ratio = count_on_rank_0(world, lambda: _count_variant(workload, parts, ends))
    fit = LinearFit(*peak)
    return replace(_fitted(times, fit), border_ratio=border_ratio, cast_bytes=max(fit.base - plain_base, 0.0))


def _count_variant(
    workload: Workload, parts: Sequence[Part], ends: tuple[int, int]
) -> tuple[tuple[float, float], float, float]:
    """The peak; its base without the parts that change the forward; and the ratio of bytes between blocks."""
    borders, peaks = [], []
    for some in (parts, _unchanged(parts)):
        row, starts = find_cut_points(workload.step(ends[0], some), timed=False)
        borders.append(sum(row.blocks[number].input for number in starts or range(len(row.blocks))))
        peaks.append(_peak(workload, some, ends))
    ratio = borders[0] / borders[1] if borders[1] else 1.0
    return (peaks[0].base, peaks[0].slope), peaks[1].base, ratio


def _unchanged(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if not part.changes_forward]


def _peak(workload: Workload, parts: Sequence[Part], ends: tuple[int, int]) -> LinearFit:
    return LinearFit.through([(n, estimate(workload.step(n, parts)).running) for n in ends])


def _count(workload: Workload, base: Sequence[Part], ends: tuple[int, int]) -> ModelProfile:
    """Bytes, and the blocks of the model. Seconds are filled in later."""
    n, model = ends[0], workload.model
    segments = next((part for part in base if part.segments), None)
    estimates = []
    for size in ends:
        step = workload.step(size, base)
        estimates.append(estimate(step, budget.install_for(segments, step)))
    first = estimates[0]
    peak = LinearFit.through([(size, e.running) for size, e in zip(ends, estimates, strict=True)])
    plain = _unchanged(base)
    casts = _peak(workload, base, ends).base - _peak(workload, plain, ends).base if len(plain) < len(base) else 0.0
    return ModelProfile(
        samples=workload.samples,
        declared=ForwardProfile(peak=peak, cast_bytes=max(casts, 0.0)),
        update=0.0,
        parameters=first.parameters,
        gradients=first.gradients,
        state=first.optimizer,
        buffers=first.buffers,
        update_peak=first.updating,
        tensors=sum(p.requires_grad for p in model.parameters()),
        largest_segment=fsdp.largest(model, SEGMENT),
        averaging=averaging.average_bytes(list(model.parameters())),
        blocks=_blocks(workload, base, n),
        shapes=tuple(tuple(p.shape) for p in model.parameters()),
    )


def _blocks(workload: Workload, base: Sequence[Part], n: int) -> tuple[BlockShare, ...]:
    row, starts = find_cut_points(workload.step(n, base))
    modules = dict(named_modules(workload.model))
    numbers = {id(p): number for number, p in enumerate(workload.model.parameters())}
    owners: dict[int, int] = {}
    blocks = []
    for number, block in enumerate(row.blocks):
        trained = [p for p in modules[block.name].parameters() if p.requires_grad]
        own = sum(p.nbytes for p in trained if owners.setdefault(id(p), number) == number)
        tied = tuple((owners[id(p)], p.nbytes, numbers[id(p)]) for p in trained if owners[id(p)] != number)
        seconds, saved = block.forward + block.backward, (block.input_saved + block.saved) // n
        blocks.append(BlockShare(block.name, seconds, own, block.input // n, saved, number in starts, tied))
    return tuple(blocks)


# --- real steps -----------------------------------------------------------------------------------
def _timed(workload: Workload, parts: Sequence[Part], sizes: Sequence[int], world: World, seconds: float) -> Answer:
    """The times of the slowest rank."""
    answers = on_all_ranks(partial(_run, parts, sizes), workload, world, seconds=seconds)
    if failed := next((answer for answer in answers if answer.error), None):
        return failed
    values = [answer.value for answer in answers]
    times = [
        (n, max(v["times"][i][1] for v in values), max(v["times"][i][2] for v in values)) for i, n in enumerate(sizes)
    ]
    return Answer(value={"times": times, "update": max(v["update"] for v in values)})


def _run(parts: Sequence[Part], sizes: Sequence[int], workload: Workload, world: World) -> Any:
    """Runs in a child: forward, backward and update at each size, on all ranks at once but without communication."""
    engine = Engine(compose(_local(parts)), workload.model, workload.optimizer, World(ProcessInfo(), world.device))
    model, optimizer, device = engine.model, engine.optimizer, world.device
    times: list[tuple[int, float, float]] = []
    updates: list[float] = []
    for n in (sizes[0], *sizes):  # the first is a warm-up
        inputs, targets = workload.batch(n)
        best: tuple[float, float] | None = None
        for _ in range(2):
            world.barrier()
            start = now(device)
            loss = loss_by(model, inputs, targets, workload.loss_fn)
            middle = now(device)
            loss.backward()
            end = now(device)
            optimizer.step()
            updates.append(now(device) - end)
            optimizer.zero_grad(set_to_none=world.size == 1)  # DDP's buckets keep the gradients allocated
            del loss
            best = min(best or (9e9, 9e9), (middle - start, end - middle), key=sum)
            if world.largest(sum(best)) > SHORT or not times:
                break
        assert best is not None
        times.append((n, *best))
    return {"times": times[1:], "update": min(updates[1:] or updates)}


def _local(parts: Sequence[Part]) -> list[Part]:
    """The parts with which one rank can run a step alone, at the same speed."""
    distributed = {Stage.REDUCE, Stage.WIRE, Stage.GATE, Stage.SCHEDULE}
    return [
        part for part in parts
        if not part.divides and not budget_of([part]) and not distributed & {act.stage for act in part.acts()}
    ]  # fmt: skip
