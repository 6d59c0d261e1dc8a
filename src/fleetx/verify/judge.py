"""Check the numbers and effects of one combination of strategies."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fleetx.strategy.part import every, settings_of
from fleetx.verify import oracle, runs
from fleetx.verify.combinations import Switches, conflicts_of, declared, kind_of, parts
from fleetx.verify.ranks import RankError, Ranks

_FLOAT32 = ("amp", "dgc")  # strategies that only act on float32
Results = list[dict[str, Any]]  # of one run, by rank
_ROUNDING = {torch.float64: 1e-11, torch.float32: 2e-5}
_NEXT = 2**-11  # from one float16 to the next, relative to its value


@dataclass
class Seen:
    """The effect of one strategy in a combination: the quantity that shows it, with and without the strategy."""

    sentence: str
    quantity: str
    on: float
    off: float
    acts: bool | None  # None: too few replicas to see it

    def failure(self, switch: str) -> str:
        return f"`{switch}` does not act: {self.quantity} is {self.on:g} with it and {self.off:g} without it"


@dataclass
class Verdict:
    switches: Switches
    kind: str = "failed"  # equal, lossy, refused (a contradiction), unbuilt or failed
    reason: str = ""
    error: float = 0.0  # distance to the oracle, as a share of the distance trained, at lossless settings
    bound: float = 0.0
    acting_error: float = 0.0  # the same at lossy settings, if these have a bound
    acting_bound: float = 0.0
    ranks: int = 0
    dtype: str = ""
    effects: dict[str, Seen] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.kind != "failed"

    @property
    def ran(self) -> bool:
        return self.kind not in ("refused", "unbuilt")


class Judge:
    """Judges combinations on pools of two and four ranks. Equal runs happen only once."""

    def __init__(self, device: str = "cpu", pools: Mapping[int, Ranks] | None = None):
        self._device = device
        self._pools = dict(pools or {})
        self._results: dict[str, Results] = {}

    def close(self) -> None:
        for pool in self._pools.values():
            pool.stop()

    def judge(self, chosen: Switches) -> Verdict:
        start = time.monotonic()
        verdict = Verdict(chosen)
        if problems := conflicts_of(declared(chosen)):
            verdict.kind, verdict.reason = kind_of(problems), "; ".join(problems)
            return verdict
        try:
            self._numbers(verdict)
            if verdict.ran and verdict.ok:
                self._effects(verdict)
        except RankError as error:
            verdict.kind, verdict.reason = "failed", str(error)
        verdict.seconds = time.monotonic() - start
        return verdict

    # --- numbers ----------------------------------------------------------------------------------
    def _numbers(self, verdict: Verdict) -> None:
        chosen = verdict.switches
        unknown = set(chosen) - oracle.KNOWN
        if unknown:
            verdict.reason = f"verify/oracle.py does not know {', '.join(sorted(unknown))}: add what it does to numbers"
            return
        size, dtype = ranks_for(chosen), dtype_for(chosen)
        verdict.ranks, verdict.dtype = size, str(dtype).removeprefix("torch.")
        results = self._run(chosen, chosen, size, True)
        if problems := results[0].get("refused"):
            verdict.kind, verdict.reason = kind_of(problems), "; ".join(problems)
            return
        found = state(results)
        model = runs.Stack()
        replicas = size // (2 if "pipeline" in chosen else 1)
        wanted = oracle.train(
            model,
            partial(runs.optimizer_for, switches=chosen),
            {switch: settings_of(part) for switch, part in parts(chosen, lossless=True).items()},
            [(x.to(dtype), y.to(dtype)) for x, y in runs.batches(steps_for(chosen))],
            mse_loss,
            replicas,
        )
        verdict.error = distance(found, wanted, model.state_dict())
        verdict.bound = _ROUNDING[dtype]
        casts = [switch for switch in chosen if every()[switch].lossless is None]
        cast = max((every()[switch].rounding for switch in casts), default=0)
        if dtype is torch.float32 and cast:  # values that float32 rounds differently may be cast to neighbours
            verdict.bound = rounding(casts) if rounding(casts) > cast else _NEXT  # others may amplify that
        lossless = [every()[switch] for switch in chosen if every()[switch].lossless is not None]
        lossy = bool(lossless or rounding(chosen))
        if lossless and all(part.rounding for part in lossless):  # others have no bound at lossy settings
            acting = self._run(chosen, chosen, size, False)
            verdict.acting_error = distance(state(acting), wanted, model.state_dict())
            verdict.acting_bound = rounding(chosen)
        if verdict.error <= verdict.bound and verdict.acting_error <= verdict.acting_bound:
            verdict.kind = "lossy" if lossy else "equal"
        else:
            off = max(verdict.error, verdict.acting_error)
            verdict.reason = f"differs from one plain process by {off:.1e} of the distance trained"

    # --- effects ----------------------------------------------------------------------------------
    def _effects(self, verdict: Verdict) -> None:
        chosen, size = verdict.switches, verdict.ranks
        on = self._run(chosen, chosen, size, False)
        for switch in chosen:
            off = self._run(tuple(s for s in chosen if s != switch), chosen, size, False)
            verdict.effects[switch] = seen = observed(switch, on, off)
            if seen.acts is False:
                verdict.kind = "failed"
                verdict.reason += f"{seen.failure(switch)}. "

    def _run(self, chosen: Switches, full: Switches, size: int, lossless: bool) -> Results:
        lossless = lossless and any(every()[s].lossless is not None for s in chosen)
        if size not in self._pools:
            self._pools[size] = Ranks(size, device=self._device)
        job = declared(chosen, full, lossless=lossless), full, dtype_for(full), steps_for(full)
        key = key_of(*job, size)
        if key not in self._results:
            self._results[key] = self._pools[size].run(runs.run, *job)
        return self._results[key]


def key_of(strategy: Mapping[str, Any], full: Switches, dtype: torch.dtype, steps: int, size: int) -> str:
    """A key that is the same for equal runs. Of `full`, only the optimizer counts, so many combinations share runs."""
    return repr((strategy, type(runs.optimizer_for(nn.Linear(1, 1), full)), dtype, steps, size))


def observed(switch: str, on: Results, off: Results) -> Seen:
    """What a strategy changes, given the results of all ranks with and without it."""
    effect = every()[switch].effect
    if effect is None:
        return Seen("declares no effect", "nothing", 0, 0, acts=False)
    if "refused" in off[0]:
        raise RankError(f"without `{switch}` it raises an error: {'; '.join(off[0]['refused'])}")
    half = len(on[0]["steps"]) // 2
    early, late, total = (
        tuple(quantities(results, part)[effect.quantity] for results in (on, off))
        for part in (slice(half), slice(half, None), slice(None))
    )
    acts = None
    if 1 + max(r["replica"] for r in on) >= effect.replicas:
        # Check both halves, because it may stop acting midway. A half with little to see even without it shows nothing.
        halves = [pair for pair in (early, late) if pair[1] >= total[1] / 10]
        groups = any(r["shard"] or r["inside"] > 1 for r in on)
        acts = all(effect.seen(*pair, in_part=groups) for pair in (total, *halves))
    return Seen(effect.sentence, effect.quantity, total[0], total[1], acts)


def quantities(results: Results, part: slice) -> dict[str, float]:
    """What was counted in these steps, over all ranks."""
    by_rank = [{key: sum(s[key] for s in r["steps"][part]) for key in r["steps"][0]} for r in results]
    out = {key: sum(counted[key] for counted in by_rank) for key in by_rank[0]}
    out["most_bytes_sent"] = max(counted["bytes_sent"] for counted in by_rank)
    out["bytes_held"] /= sum(len(r["steps"][part]) for r in results)
    out["ranks_apart"] = sum(len(set(same)) > 1 for same in _replicas(results, part))
    return out


def state(results: Results) -> dict[str, Tensor]:
    """The whole model: pipeline stages hold different parameters. Of those that several ranks hold, rank 0's count."""
    return {name: tensor for result in reversed(results) for name, tensor in result["state"].items()}


def _replicas(results: Results, part: slice) -> Iterator[list[float]]:
    """After each of these steps, the checksums of the ranks that hold the same parameters."""
    holding: dict[tuple[int, tuple[str, ...]], list[list[float]]] = {}
    for result in results:
        sums = [step["checksum"] for step in result["steps"][part]]
        holding.setdefault((result["shard"], tuple(result["state"])), []).append(sums)
    for same in holding.values():
        yield from (list(values) for values in zip(*same, strict=True))


def ranks_for(chosen: Switches) -> int:
    return 4 if {"pipeline", "sharding", "use_hierarchical_allreduce"} & set(chosen) else 2


def dtype_for(chosen: Switches) -> torch.dtype:
    return torch.float32 if set(_FLOAT32) & set(chosen) else torch.float64


def steps_for(chosen: Switches) -> int:
    return runs.steps_for({switch: settings_of(part) for switch, part in parts(chosen).items()})


def rounding(chosen: Iterable[str]) -> float:
    """The largest error that the rounding of these strategies may cause together."""
    found = [every()[switch] for switch in chosen]
    return max((p.rounding for p in found), default=0.0) * max((p.amplifies for p in found), default=1.0)


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """How far off the result is, as a share of the distance that parameters and buffers have moved since `start`."""
    if missing := set(wanted) - set(found):
        raise RankError(f"no rank holds {', '.join(sorted(missing))}")
    wanted = {k: w for k, w in wanted.items() if w.is_floating_point()}
    off = sum(_square(found[k], w) for k, w in wanted.items())
    went = sum(_square(w, start[k.removeprefix(oracle.AVERAGED)]) for k, w in wanted.items())
    share = float((off / went) ** 0.5) if went else float("inf" if off else 0)
    return math.inf if math.isnan(share) else share  # NaN is not within any bound, but is not above it either


def _square(a: Tensor, b: Tensor) -> float:
    """|a - b|^2. The infinities of a mask are no distance from themselves."""
    a, b = a.double(), b.double()
    return float((a - b).masked_fill(a == b, 0).square().sum())
