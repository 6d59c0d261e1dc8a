"""The goals, and what was reached: every one is a ratio within one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.slow_network.model import TITLES
from benchmarks.slow_network.summary import Cell, Cells, Rows, cells, reached

RATE = "100mbit"  # at which there are goals
NEAR = 0.005  # of accuracy: half a point
CLOSE = 1.05  # of the loss that synchronous SGD ends with: what counts as having got there


@dataclass(frozen=True)
class Goal:
    what: str
    value: float | None  # None: never got there
    goal: float
    least: bool = False  # is the goal the least, or the most, that the value may be?

    @property
    def met(self) -> bool:
        return self.value is not None and (self.value >= self.goal if self.least else self.value <= self.goal)

    def words(self) -> list[str]:
        value = "never" if self.value is None else f"{self.value:.3f}" if self.value < 10 else f"{self.value:.1f}"
        limit = f"{'at least' if self.least else 'at most'} {self.goal:g}"
        return [self.what, value, limit, "met" if self.met else "**not met**"]


def of_steps(rows: Rows) -> Iterator[Goal]:
    for model in dict.fromkeys(row["model"] for row in rows):
        found = cells(rows, model)
        if all((way, RATE) in found for way in ("alone", "ddp", "fp16_hook", "dgc16", "local", "overlap")):
            yield from _of_model(TITLES[model], found)


def _of_model(title: str, found: Cells) -> Iterator[Goal]:
    def at(way: str) -> Cell:
        return found[way, RATE]

    compute = at("alone").step
    for way, words in (("dgc16", "DGC (fp16 values)"), ("dgc32", "DGC (fp32 values)")):
        if (way, RATE) in found:
            dgc = at(way)
            what = f"{title}: {words}"
            yield Goal(f"{what}, step / (compute + its bytes / bandwidth)", dgc.step / (compute + dgc.floor), 1.5)
            yield Goal(f"{what}, times faster than fp32 DDP", at("ddp").step / dgc.step, 45, least=True)
            yield Goal(f"{what}, times faster than the fp16 hook", at("fp16_hook").step / dgc.step, 22, least=True)
    overlap, local = at("overlap"), at("local")
    bound = "step / max(compute, bytes / (H bandwidth))"
    yield Goal(f"{title}: LocalSGD with overlap, {bound}", overlap.step / max(compute, overlap.floor), 1.05)
    yield Goal(f"{title}: LocalSGD, blocking, {bound}", local.step / max(compute, local.floor), 1.1)
    if ("post_local", RATE) in found:
        peer = at("post_local")
        yield Goal(f"{title}: (torch's PostLocalSGD, {bound})", peer.step / max(compute, peer.floor), 1.1)


def of_task(rows: Rows) -> Iterator[Goal]:
    by_name = {row["way"]: row for row in rows}
    if "ddp" not in by_name:
        return
    dense = by_name["ddp"]["moments"][-1]
    accuracy, loss = target_accuracy(rows), target_loss(rows)
    power = [t for w in ("power1", "power4") if w in by_name and (t := reached(by_name[w], "accuracy", accuracy))]
    last = [by_name[w]["moments"][-1]["seconds"] for w in ("power1", "power4") if w in by_name]
    for way in ("dgc16", "local8", "local16_overlap", "local32_overlap", "adaptive16"):
        if way in by_name and last:
            ours = reached(by_name[way], "accuracy", accuracy)
            # PowerSGD that never got there took at least as long as it ran.
            yield Goal(f"task: {by_name[way]['title']}, time to {accuracy:.2%} / the better PowerSGD's"
                       f"{'' if power else ' whole run, which never got there'}",
                       ours and ours / min(power or last), 1.0)  # fmt: skip
    for way in ("dgc16", "dgc32", "local8", *(f"local{k}_overlap" for k in (8, 16, 32)), "adaptive16", "adaptive32"):
        if way in by_name:
            behind = dense["accuracy"] - by_name[way]["moments"][-1]["accuracy"]
            yield Goal(f"task: {by_name[way]['title']}, points behind dense", 100 * behind, 100 * NEAR)
    fixed = [t for w in ("ddp", "local2", "local4", "local8", "local16")
             if w in by_name and (t := reached(by_name[w], "loss", loss))]  # fmt: skip
    sync = reached(by_name["ddp"], "loss", loss)
    for way in ("adaptive16", "adaptive32"):
        if way in by_name and sync and fixed:
            title, ours = by_name[way]["title"], reached(by_name[way], "loss", loss)
            yield Goal(f"task: {title}, times sooner than synchronous SGD at loss {loss:.3f}",
                       ours and sync / ours, 3, least=True)  # fmt: skip
            yield Goal(f"task: {title}, time to that loss / the best fixed H", ours and ours / min(fixed), 1.05)


def target_accuracy(rows: Rows) -> float:
    return next(row for row in rows if row["way"] == "ddp")["moments"][-1]["accuracy"] - NEAR


def target_loss(rows: Rows) -> float:
    return next(row for row in rows if row["way"] == "ddp")["moments"][-1]["loss"] * CLOSE


def of_hierarchy(rows: Rows) -> Iterator[Goal]:
    for model in dict.fromkeys(row["model"] for row in rows):
        found = cells(rows, model)
        for rate in dict.fromkeys(rate for _, rate in found if rate):
            tree, flat = found.get(("hierarchical", rate)), found.get(("dense", rate))
            if tree and flat:
                yield Goal(f"{TITLES[model]}, 2 x 2, {rate}: hierarchical, step / (its bytes / bandwidth)",
                           tree.step / tree.floor, 1.05)  # fmt: skip
                yield Goal(f"{TITLES[model]}, 2 x 2, {rate}: flat, step / hierarchical", flat.step / tree.step, 1.0,
                           least=True)  # fmt: skip


def everything(results: dict[str, Any]) -> list[Goal]:
    of = {"steps": of_steps, "task": of_task, "hierarchy": of_hierarchy}
    return [goal for name, rows in results.items() if name in of for goal in of[name](rows)]
