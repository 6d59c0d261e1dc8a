"""`fleetx verify --model`: the user's model, batch and strategy against one plain process."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fleetx.errors import FleetxError, UsageError
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.part import every, switch_of
from fleetx.verify import oracle, runs
from fleetx.verify.judge import Results, distance, observed, problems_of, state
from fleetx.verify.oracle import Settings
from fleetx.verify.ranks import Ranks

Made = tuple[nn.Module, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]
STEPS = 6


def make(where: str) -> Made:
    """Call the user's function `module:function`, which returns (model, x, y, loss_fn)."""
    module, _, name = where.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--model {where}: {error}: pass module:function, such as train:example") from error
    torch.manual_seed(0)
    made = function()
    if not (isinstance(made, Sequence) and len(made) == 4 and isinstance(made[0], nn.Module)):
        at = inspect.getsourcefile(function)
        raise UsageError(f"--model {where} ({at}): must return (model, x, y, loss_fn), not {type(made).__name__}")
    return tuple(made)


def verify(where: str, strategy: DistributedStrategy, size: int, device: str) -> tuple[bool, list[str]]:
    """Train with the strategy on `size` ranks. Is the result right, and what was found, in sentences?"""
    settings = _settings(strategy)
    if unknown := set(settings) - oracle.KNOWN:
        raise UsageError(f"verify cannot compute what {', '.join(sorted(unknown))} leads to: turn it off")
    dtype = torch.float32 if {"amp", "dgc"} & set(settings) else torch.float64
    declared = strategy.declared()
    pool = Ranks(size, device=device)
    try:
        results = pool.run(_job, where, declared, list(settings), dtype)
        if "refused" in results[0]:
            return False, results[0]["refused"]
        right, lines = _numbers(make(where), settings, results, dtype)
        for switch in settings:
            without = {
                k: v for k, v in declared.items() if k not in (switch, f"{switch}_configs", *every()[switch].flat)
            }
            seen = observed(switch, results, pool.run(_job, where, without, list(settings), dtype))
            right &= seen.acts is not False
            lines.append(f"{switch} acts: {seen.sentence}" if seen.acts else seen.failure(switch))
    finally:
        pool.stop()
    return right, lines


def _settings(strategy: DistributedStrategy) -> dict[str, dict[str, Any]]:
    return {
        switch_of(type(part)): {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}  # type: ignore[arg-type]
        for part in strategy.plan().parts
        if not part.always
    }


def _numbers(made: Made, settings: Settings, results: Results, dtype: torch.dtype) -> tuple[bool, list[str]]:
    model, x, y, loss_fn = made
    found, start, batches = state(results), model.state_dict(), [(x, y)] * STEPS
    bound = max([1e-4 if dtype is torch.float32 else 1e-10, *(every()[s].rounding for s in settings)])
    replicas = 1 + max(r["replica"] for r in results)

    make_optimizer = partial(runs.optimizer_for, switches=list(settings))

    def gap(replicas: int) -> float:
        return distance(found, oracle.train(model, make_optimizer, settings, batches, loss_fn, replicas), start)

    error = gap(replicas)
    lines = [
        f"{' + '.join(settings) or 'data parallelism'} on {len(results)} ranks "
        f"{'equals' if error <= bound else 'DIFFERS from'} the same training in one plain float64 process: off by "
        f"{error:.1e} of the distance trained (bound {bound:.0e})"
    ]
    if error > bound:
        return False, lines
    if {"localsgd", "adaptive_localsgd"} & set(settings):
        lines.append("between two averages the ranks train apart, so this is not training on the big batch")
    elif (difference := gap(1)) > bound:
        norms = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
        why = "the loss of the whole batch is not the mean over its shares: use fleet.weight"
        if norms and "sync_batch_norm" not in settings:
            why = f"BatchNorm ({', '.join(norms[:3])}) uses the statistics of each share: turn sync_batch_norm on"
        lines.append(f"one process with the big batch differs by {difference:.1e}, because {why}")
    else:
        lines.append(f"it equals one process with the big batch, off by {difference:.1e}")
    return True, lines


def _job(where: str, declared: dict[str, Any], switches: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    try:
        model, x, y, loss_fn = make(where)
        return runs.train(model, [(x, y)] * STEPS, loss_fn, declared, switches, dtype)
    except FleetxError as error:
        return {"refused": problems_of(error)}
