"""`fleetx verify --model`: the user's model, batch and strategy against one plain process."""

from __future__ import annotations

import copy
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fleetx.base.seams import BatchNormBase, DropoutBase
from fleetx.errors import FleetxError, StrategyError, UsageError
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.part import defaults_of, every, settings_of, switch_of
from fleetx.strategy.settings import changed
from fleetx.verify import oracle, runs
from fleetx.verify.judge import Results, distance, dtype_for, observed, rounding, state
from fleetx.verify.oracle_updates import SwitchSettings
from fleetx.verify.ranks import Ranks

Made = tuple[nn.Module, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]
_RETURNS = "it must return (model, x, y, loss_fn)"


def make(where: str) -> Made:
    """Call the user's function `module:function`, which returns (model, x, y, loss_fn)."""
    module, _, name = where.partition(":")
    if not module or not name or module.endswith(".py"):
        raise UsageError(f"--model {where}: write module:function, such as train:example for example() in train.py")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise UsageError(f"--model {where}: {error}: pass module:function, such as train:example") from error
    except Exception as error:
        raise UsageError(f"--model {where}: importing {module} raised {_told(error)}") from error
    if not callable(function):
        raise UsageError(f"--model {where}: {name} is not a function but {function!r}")
    torch.manual_seed(0)
    try:
        made = function()
    except Exception as error:
        raise UsageError(f"--model {where}: {name}() raised {_told(error)}") from error
    if not isinstance(made, Sequence) or len(made) != 4:
        what = f"{len(made)} values" if isinstance(made, Sequence) else type(made).__name__
        raise UsageError(f"--model {where}: {name}() returned {what}, but {_RETURNS}")
    for value, kind, words in zip(
        made, (nn.Module, Tensor, Tensor), ("a module", "a tensor", "a tensor"), strict=False
    ):
        if not isinstance(value, kind):
            raise UsageError(
                f"--model {where}: {name}() returned {type(value).__name__} instead of {words}: {_RETURNS}"
            )
    if not callable(made[3]):
        raise UsageError(f"--model {where}: {name}() returned {made[3]!r} instead of a loss function: {_RETURNS}")
    return tuple(made)


def _told(error: Exception) -> str:
    """An error in the user's code, with the line that raised it."""
    here, torchs = str(Path(__file__).parent.parent), str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith((here, torchs, "<"))]
    at = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {error}{at}"


def _try(where: str, made: Made, size: int) -> None:
    """Run one step in this process, so that mistakes show up without other ranks."""
    model, x, y, loss_fn = copy.deepcopy(made[0]), *made[1:]
    if len(x) != len(y) or len(x) < size:
        raise UsageError(
            f"--model {where}: x has {len(x)} samples and y has {len(y)}: they need equally many, at least one per rank"
        )
    try:
        loss = loss_fn(model(x), y)
        loss.backward()
    except NotFiniteError:
        raise
    except Exception as error:
        raise UsageError(f"--model {where}: loss_fn(model(x), y) and its backward raised {_told(error)}") from error
    for name, p in model.named_parameters():
        if p.grad is not None:
            _check_finite(where, f"the gradient of {name}", p.grad)
    if drops := [name for name, m in model.named_modules() if isinstance(m, DropoutBase) and m.p and m.training]:
        raise UsageError(
            f"--model {where}: dropout ({', '.join(drops[:3])}) draws different random numbers on each rank, so the "
            "result cannot be compared: return the model with p=0 there"
        )


class NotFiniteError(UsageError):
    """The user's model does not train in plain PyTorch, so there is nothing to compare with."""


def _check_finite(where: str, what: str, values: Tensor) -> None:
    values = values.coalesce().values() if values.is_sparse else values
    if len(odd := values.detach()[~values.isfinite()]):
        raise NotFiniteError(
            f"--model {where}: {what} is {odd[0]:g} in plain PyTorch, without any strategy, so there is no result to "
            f"compare with: return a model, a batch and a loss that stay finite in training at a rate of {runs.LR}"
        )


def _finite(where: str, made: Made) -> Made:
    """The same, with a loss that must be finite: a step on a loss of NaN may leave finite parameters."""
    model, x, y, loss_fn = made

    def checked(output: Tensor, target: Tensor) -> Tensor:
        loss = loss_fn(output, target)
        _check_finite(where, "loss_fn(model(x), y)", loss)
        return loss

    return model, x, y, checked


class NotComputableError(UsageError):
    """The oracle cannot compute the result of this strategy, so verify cannot judge it."""


def check_computable(settings: SwitchSettings) -> None:
    for switch, chosen in settings.items():
        if switch not in oracle.KNOWN:
            raise NotComputableError(f"verify cannot compute {switch}: turn it off")
        defaults = defaults_of(every()[switch])
        reads = oracle.READS.get(switch, set(defaults))
        for key, value in chosen.items():
            if value != defaults[key] and (key not in reads or (value is None and switch in oracle.READS)):
                raise NotComputableError(
                    f"verify cannot compute {switch} with {key}={value!r}: verify it without {key}"
                )


def verify(where: str, strategy: DistributedStrategy, size: int, device: str) -> tuple[bool, list[str]]:
    """Train with the strategy on `size` ranks. Returns whether the result is right, and the findings as sentences."""
    if choosers := [switch for switch, part in every().items() if part.is_meta and getattr(strategy, switch)]:
        raise NotComputableError(
            f"verify cannot compute {choosers[0]}, which only chooses a strategy: run fleetx plan with your "
            "script, and verify the strategy.yaml that it writes"
        )
    split = bool(strategy.batch)  # which fleetx plan writes too
    if split:
        given = strategy.declared()
        strategy = DistributedStrategy(**{key: given[key] for key in given if key not in ("batch", "batch_configs")})
    settings = _settings(strategy)
    check_computable(settings)
    made = _finite(where, make(where))
    _try(where, made, size)
    dtype = dtype_for(tuple(settings))
    steps = runs.steps_for(settings)
    declared = _acting(strategy)
    exact = _lossless(declared, settings)
    pool = Ranks(size, device=device)
    try:
        run = partial(pool.run, _job, where, steps)
        results = run(declared, list(settings), dtype)
        if problems := next((r["refused"] for r in results if "refused" in r), None):
            return False, problems
        compared = results if exact == declared else run(exact, list(settings), dtype)
        right, lines = _numbers(where, made, steps, _settings(DistributedStrategy(**exact)), compared, dtype)
        for switch in settings:
            if exact != declared and (lossless := _needs(switch)):
                lines.append(f"{switch} was compared with {lossless}, because it loses precision otherwise")
        for switch in settings:
            names = (switch, f"{switch}_configs", *every()[switch].flat)
            without = {k: v for k, v in declared.items() if k not in names}
            seen = observed(switch, results, run(without, list(settings), dtype))
            right &= seen.acts is not False
            lines.append(f"{switch} acts: {seen.sentence}" if seen.acts else _not_seen(strategy, switch, seen, steps))
    finally:
        pool.stop()
    if split:
        lines.append("batch was left out: verify itself splits your batch between the ranks")
    return right, lines


def _acting(strategy: DistributedStrategy) -> dict[str, Any]:
    """The strategy, with settings that parts have because of each other made explicit, so that one can be left out."""
    out = copy.deepcopy(strategy.declared())
    for switch, settings in _settings(strategy).items():
        given = {} if every()[switch].flat else getattr(strategy, f"{switch}_configs")
        if other := {key: settings[key] for key in given if settings[key] != given[key]}:
            out[f"{switch}_configs"] = out.get(f"{switch}_configs", {}) | other
    return out


def _not_seen(strategy: DistributedStrategy, switch: str, seen: Any, steps: int) -> str:
    part = next(part for part in strategy.plan().parts if switch_of(type(part)) == switch)
    return (
        f"{seen.failure(switch)}. That may be right for this model and {steps} steps with "
        f"{changed(part) or 'its defaults'}: try settings with which it must act"
    )


def _lossless(declared: dict[str, Any], settings: SwitchSettings) -> dict[str, Any]:
    """The strategy with settings at which no part of it loses precision."""
    out = copy.deepcopy(declared)
    for switch in settings:
        if lossless := _needs(switch):
            out[f"{switch}_configs"] = out.get(f"{switch}_configs", {}) | dict(lossless)
    return out


def _needs(switch: str) -> Mapping[str, Any] | None:
    """The lossless settings of a strategy that has no bound without them on a model that verify does not know."""
    part = every()[switch]
    return part.lossless if not part.rounding else None


def _settings(strategy: DistributedStrategy) -> dict[str, dict[str, Any]]:
    return {switch_of(type(part)): settings_of(part) for part in strategy.plan().parts if not part.always}


def _numbers(
    where: str, made: Made, steps: int, settings: SwitchSettings, results: Results, dtype: torch.dtype
) -> tuple[bool, list[str]]:
    model, x, y, loss_fn = made
    found, start, batches = state(results), model.state_dict(), [(x, y)] * steps
    bound = max(1e-4 if dtype is torch.float32 else 1e-10, rounding(settings))
    replicas = 1 + max(r["share"] for r in results)

    make_optimizer = partial(runs.optimizer_for, switches=list(settings))

    def gap(replicas: int) -> float:
        wanted = oracle.train(model, make_optimizer, settings, batches, loss_fn, replicas)
        for name in dict(model.named_parameters()).keys() & wanted.keys():
            _check_finite(where, f"{name} after {steps} steps", wanted[name])
        return distance(found, wanted, start)

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
        lines.append(
            f"one process with the big batch differs by {difference:.1e}, because {_why(made, settings, replicas)}"
        )
    else:
        lines.append(f"it equals one process with the big batch, off by {difference:.1e}")
    return True, lines


def _why(made: Made, settings: SwitchSettings, replicas: int) -> str:
    """Why training on shares of the batch is not training on all of it."""
    model, x, *_ = made
    norms = [name for name, m in model.named_modules() if isinstance(m, BatchNormBase)]
    if norms and ("sync_batch_norm" not in settings or "pipeline" in settings):
        micro = "micro-batch" if "pipeline" in settings else "share"
        way_out = "" if "sync_batch_norm" in settings else ": turn sync_batch_norm on"
        return f"BatchNorm ({', '.join(norms[:3])}) uses the statistics of each {micro}{way_out}"
    if len(x) % replicas:
        return f"{len(x)} samples cannot be split evenly between {replicas} replicas: use fleet.weight or other batches"
    return "the loss of the whole batch is not the mean of the losses of its shares: use a mean, or fleet.weight"


def _job(
    where: str, steps: int, declared: dict[str, Any], switches: Sequence[str], dtype: torch.dtype
) -> dict[str, Any]:
    try:
        model, x, y, loss_fn = make(where)
        return runs.train(model, [(x, y)] * steps, loss_fn, declared, switches, dtype)
    except FleetxError as error:
        return {"refused": error.problems if isinstance(error, StrategyError) else [str(error)]}
