"""Measures what a model asks of this device: real steps of a few sizes on all ranks at once, in children; bytes on
tensors without data."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fleetx.base.module_names import named_modules
from fleetx.base.trees import loss_by
from fleetx.comm import averaging
from fleetx.comm.paths import inside_hosts
from fleetx.comm.roles import Place
from fleetx.comm.world import World, rejoin
from fleetx.engine.engine import Engine
from fleetx.errors import UsageError
from fleetx.measure.child import Answer, forked
from fleetx.measure.fake_step import estimate
from fleetx.parts.pipeline.cut_points import find_cut_points
from fleetx.parts.recompute import budget
from fleetx.parts.sharding import fsdp
from fleetx.planner import link_benchmark
from fleetx.planner.model_profile import LinearFit, Piece, Way, Work
from fleetx.planner.workload import Job, alone, apart, from_first, name, now
from fleetx.strategy.compose import compose
from fleetx.strategy.cost_model import Cluster
from fleetx.strategy.part import Part

HALVES = (torch.float16, torch.bfloat16)
SEGMENT = 32 << 20  # bytes: as sharding gathers by default
SLOW = 1.5  # times: another way to run a forward that takes so much longer is not looked at more closely
SHORT = 1.0  # seconds: of a step that takes less, the better of two counts


# --- the machine ----------------------------------------------------------------------------------
def cluster(world: World, *, memory: int | None, global_batch: int | None) -> Cluster:
    hosts = world.hosts()
    inside = inside_hosts(hosts) or 1  # unequal hosts: nothing is arranged by them
    inner, outer = link_benchmark.tiers(world, hosts)
    if memory is None:
        memory = _memory(world, hosts.count(hosts[world.rank]))
    sixteen = {str(dtype).removeprefix("torch."): link_benchmark.reduced(world, dtype) for dtype in HALVES}
    return Cluster(
        world.size, inside, link_benchmark.reduced(world), link_benchmark.gathered(world),
        link_benchmark.scattered(world), inner, outer, link_benchmark.stream(world), memory, sixteen,
        world.device.type, global_batch,
    )  # fmt: skip


def _memory(world: World, neighbours: int) -> int:
    """What a rank may use: on a CPU its share of the machine, less a tenth that is left to the rest of it."""
    if world.device.type == "cuda":
        mine = torch.cuda.mem_get_info(world.device)[0]
    else:
        mine = int(0.9 * link_benchmark.memory() / neighbours)
    least = torch.tensor([-mine], dtype=torch.int64, device=world.device)
    world.maximum(least)  # the smallest of all
    return -int(least.item())


# --- the model ------------------------------------------------------------------------------------
def work(
    job: Job, base: Sequence[Part], ways: Sequence[Sequence[Part]], world: World, *, largest: int, seconds: float
) -> Work:
    """`base` are the user's own parts; each of `ways` are parts that change how a forward runs, to be measured too.

    largest: samples that a rank may be given at a time. A peak bends upwards where activations outgrow the rest, so its
    line goes through the smallest size and this one: between them it is rather too high than too low.
    """
    sizes = _sizes(job.samples)
    ends = sizes[0], max(largest, 2 * sizes[0])
    plain = _timed(job, base, sizes, world, seconds)
    if plain.error:
        raise UsageError(f"the model could not be run with the sample that was given: {plain.error}")
    times = plain.value["times"]
    made = from_first(world, lambda: apart(lambda: _counted(job, base, ends).written(), world.device))
    found = replace(Work.of(made), update=plain.value["update"])
    found = replace(found, plain=replace(_way(times, found.plain.peak), casts=found.plain.casts))
    for parts in ways:
        found.ways[name(parts)] = _another(job, parts, times, ends, world, seconds)
    return found


def _sizes(samples: int) -> list[int]:
    least = min(2, samples)  # batch norm does not take a single sample
    return sorted({max(samples // 4, least), max(samples // 2, least), samples})


def _way(times: Sequence[tuple[int, float, float]], peak: LinearFit) -> Way:
    return Way(LinearFit.through([(n, f) for n, f, _ in times]), LinearFit.through([(n, b) for n, _, b in times]), peak)


def _another(
    job: Job, parts: Sequence[Part], plain: Sequence[tuple[int, float, float]], ends: tuple[int, int], world: World,
    seconds: float,
) -> Way:  # fmt: skip
    """At the smallest size and the largest; where it is much slower at the smallest, that is all there is to know."""
    sizes = [int(n) for n, _, _ in plain]
    first = _timed(job, parts, sizes[:1], world, min(seconds, 5 + 20 * sum(plain[0][1:])))
    if first.error:
        return Way(error=first.error)
    times = first.value["times"]
    if sum(times[0][1:]) < SLOW * sum(plain[0][1:]) and len(sizes) > 1:
        last = _timed(job, parts, sizes[-1:], world, seconds)
        times = times + last.value["times"] if not last.error else times
    peak, bare, border = from_first(world, lambda: apart(lambda: _changed(job, parts, ends), world.device))
    line = LinearFit(*peak)
    return replace(_way(times, line), border=border, casts=max(line.base - bare[0], 0.0))


def _changed(job: Job, parts: Sequence[Part], ends: tuple[int, int]) -> tuple[list[float], list[float], float]:
    """The peak, and what it is without all that changes a forward; how much modules hand on, against how much then."""
    handed, lines = [], []
    for some in (parts, [part for part in parts if not part.changes_forward]):
        found, starts = find_cut_points(job.step(ends[0], some, kept=True), timed=False)
        handed.append(sum(found.blocks[number].input for number in starts or range(len(found.blocks))))
        line = _peak(job, some, ends)
        lines.append([line.base, line.slope])
    return lines[0], lines[1], handed[0] / handed[1] if handed[1] else 1.0


def _peak(job: Job, parts: Sequence[Part], ends: tuple[int, int]) -> LinearFit:
    return LinearFit.through([(n, estimate(job.step(n, parts, kept=True)).running) for n in ends])


def _counted(job: Job, base: Sequence[Part], ends: tuple[int, int]) -> Work:
    """Bytes, and what there is between the blocks."""
    n = ends[0]
    segments = next((part for part in base if part.segments), None)
    found = []
    for size in ends:
        step = job.step(size, base, kept=True)
        found.append(estimate(step, budget.install_for(segments, step)))
    first = found[0]
    peak = LinearFit.through([(size, e.running) for size, e in zip(ends, found, strict=True)])
    bare = [part for part in base if not part.changes_forward]
    casts = _peak(job, base, ends).base - _peak(job, bare, ends).base if len(bare) < len(base) else 0.0
    row, starts = find_cut_points(job.step(n, base, kept=True))
    modules = dict(named_modules(job.model))
    numbers = {id(p): number for number, p in enumerate(job.model.parameters())}
    owners: dict[int, int] = {}
    made = []
    for number, block in enumerate(row.blocks):
        trained = [p for p in modules[block.name].parameters() if p.requires_grad]
        own = sum(p.nbytes for p in trained if owners.setdefault(id(p), number) == number)
        tied = tuple((owners[id(p)], p.nbytes, numbers[id(p)]) for p in trained if owners[id(p)] != number)
        seconds, saved = block.forward + block.backward, (block.input_saved + block.saved) // n
        made.append(Piece(block.name, seconds, own, block.input // n, saved, number in starts, tied))
    return Work(
        job.samples, Way(peak=peak, casts=max(casts, 0.0)), 0.0, first.parameters, first.gradients, first.optimizer,
        first.buffers, first.updating, sum(p.requires_grad for p in job.model.parameters()),
        fsdp.largest(job.model, SEGMENT), averaging.average_bytes(list(job.model.parameters())), tuple(made),
        shapes=tuple(tuple(p.shape) for p in job.model.parameters()),
    )  # fmt: skip


# --- real steps -----------------------------------------------------------------------------------
def together(call: Callable[[Job, World], Any], job: Job, world: World, seconds: float) -> list[Answer]:
    """In a child of every rank, with a world of their own. The answers of all ranks, on all ranks."""
    with socket.create_server(("", 0), backlog=128) as meeting:
        first = world.place.master.rpartition(":")[0] or os.environ.get("MASTER_ADDR", "127.0.0.1")
        mine = first, meeting.getsockname()[1]
        host, port = world.broadcast_json(mine)
        if world.device.type == "cuda":  # a device that is in use cannot be forked; nor does one die that is full
            answer = _here(lambda: call(job.copied(), world))
        else:
            answer = forked(lambda: call(job, rejoin(world, host, port, meeting.detach())), seconds=seconds)
    return [Answer(**told) for told in world.gather_json({"value": answer.value, "error": answer.error})]


def _here(call: Callable[[], Any]) -> Answer:
    try:
        return Answer(value=call())
    except Exception as error:
        return Answer(error=f"{type(error).__name__}: {str(error)[:300]}")


def _timed(job: Job, parts: Sequence[Part], sizes: Sequence[int], world: World, seconds: float) -> Answer:
    """The times of the slowest rank."""
    answers = together(partial(_run, parts, sizes), job, world, seconds)
    if wrong := next((answer for answer in answers if answer.error), None):
        return wrong
    values = [answer.value for answer in answers]
    times = [
        (n, max(v["times"][i][1] for v in values), max(v["times"][i][2] for v in values)) for i, n in enumerate(sizes)
    ]
    return Answer(value={"times": times, "update": max(v["update"] for v in values)})


def _run(parts: Sequence[Part], sizes: Sequence[int], job: Job, world: World) -> Any:
    """In a child: forward, backward and update, of each size, all ranks at once."""
    here = World(Place(), world.device)
    engine = Engine(compose(alone(parts)), job.model, job.optimizer, here)
    model, optimizer = engine.model, engine.optimizer
    times: list[tuple[int, float, float]] = []
    updates: list[float] = []
    for n in (sizes[0], *sizes):  # the first time is to warm up
        inputs, targets = job.batch(n)
        best: tuple[float, float] | None = None
        for _ in range(2):
            world.barrier()
            begun = now(world.device)
            value = loss_by(model, inputs, targets, job.loss_fn)
            passed = now(world.device)
            value.backward()
            undone = now(world.device)
            optimizer.step()
            updates.append(now(world.device) - undone)
            optimizer.zero_grad(set_to_none=world.size == 1)  # as it is with DDP's buckets: there to be added to
            del value
            best = min(best or (9e9, 9e9), (passed - begun, undone - passed), key=sum)
            longest = torch.tensor([sum(best)])
            world.maximum(longest)  # all ranks go on together
            if longest.item() > SHORT or not times:
                break
        assert best is not None
        times.append((n, *best))
    return {"times": times[1:], "update": min(updates[1:] or updates)}
