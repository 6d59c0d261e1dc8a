"""The goals, and what was reached. Each goal is a ratio within one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.slow_network.model import TITLES
from benchmarks.slow_network.summary import Cell, Cells, Rows, cells, reached

RATE = "100mbit"  # the rate that the goals are for
NEAR = 0.005  # of accuracy: half a percentage point
ADAPTIVE = ("adaptive8", "adaptive16", "adaptive32")
CLOSE = 1.05  # times the final loss of synchronous SGD: the target loss


@dataclass(frozen=True)
class Goal:
    what: str
    value: float | None  # None: never reached
    goal: float
    least: bool = False  # is the goal a minimum instead of a maximum?

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
        if all((method, RATE) in found for method in ("alone", "ddp", "fp16_hook", "dgc16", "local", "overlap")):
            yield from _of_model(TITLES[model], found)


def _of_model(title: str, found: Cells) -> Iterator[Goal]:
    def at(method: str) -> Cell:
        return found[method, RATE]

    compute = at("alone").step
    for method, words in (("dgc16", "DGC (fp16 values)"), ("dgc32", "DGC (fp32 values)")):
        if (method, RATE) in found:
            dgc = at(method)
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
    by_name = {row["way"]: row for row in rows if not row.get("same_rate")}
    if "ddp" not in by_name:
        return
    dense = by_name["ddp"]["moments"][-1]
    yield from _against_power(by_name, target_accuracy(rows))
    late = [f"local{k}_overlap" for k in (8, 16, 32)]
    for method in ("dgc16", "dgc32", "local8", *late, *ADAPTIVE):
        if method in by_name:
            behind = dense["accuracy"] - by_name[method]["moments"][-1]["accuracy"]
            yield Goal(f"task: {by_name[method]['title']}, points behind dense", 100 * behind, 100 * NEAR)
    rate = by_name["ddp"]["learning_rate"]
    alike = {row["way"]: row for row in rows if row["learning_rate"] == rate}  # with the learning rate of dense
    for key, target, words in (
        ("loss", target_loss(rows), f"loss {target_loss(rows):.3f}"),
        ("accuracy", target_accuracy(rows), f"{target_accuracy(rows):.2%}"),
    ):
        yield from _adaptive(alike, key, target, words)


def _against_power(by_name: dict[str, Any], accuracy: float) -> Iterator[Goal]:
    """Time to an accuracy that PowerSGD reaches: half a point below dense, or its own if that is lower."""
    power = [by_name[w] for w in ("power1", "power4") if w in by_name]
    if not power:
        return
    accuracy = min(accuracy, max(row["moments"][-1]["accuracy"] for row in power))
    theirs = min(t for row in power if (t := reached(row, "accuracy", accuracy)))
    for method in ("dgc16", "local8", "local16_overlap", "local32_overlap", "adaptive16"):
        if method in by_name:
            mine = reached(by_name[method], "accuracy", accuracy)
            yield Goal(f"task: {by_name[method]['title']}, time to {accuracy:.2%} / the better PowerSGD's",
                       mine and mine / theirs, 1.0)  # fmt: skip


def _adaptive(alike: dict[str, Any], key: str, target: float, words: str) -> Iterator[Goal]:
    sync = reached(alike["ddp"], key, target)
    fixed = [t for w in ("ddp", "local2", "local4", "local8", "local16")
             if w in alike and (t := reached(alike[w], key, target))]  # fmt: skip
    for method in ADAPTIVE:
        if method in alike and sync and fixed:
            title, mine = alike[method]["title"], reached(alike[method], key, target)
            yield Goal(
                f"task: {title}, times sooner than synchronous SGD at {words}", mine and sync / mine, 3, least=True
            )
            yield Goal(f"task: {title}, time to {words} / the best fixed H", mine and mine / min(fixed), 1.05)


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
