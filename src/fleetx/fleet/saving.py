"""`fleet.save`, `load`, `latest`, `keep_batch`, `checkpoints` and `export`. The checkpoint code is imported on use."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fleetx.base.branch_order import ordered
from fleetx.base.user_line import warn
from fleetx.comm import peers
from fleetx.comm.roles import ProcessInfo
from fleetx.comm.session import current
from fleetx.comm.world import World
from fleetx.errors import StrategyError, UsageError
from fleetx.fleet import averaging
from fleetx.strategy import DistributedStrategy

if TYPE_CHECKING:
    from fleetx.engine.checkpoint import Branch, Checkpoints


def _path(folder: str | Path, call: str) -> Path:
    if not isinstance(folder, str | os.PathLike) or "\0" in str(folder):
        raise UsageError(f"{call}({folder!r}): must be the path of a folder")
    return Path(folder)


def save(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    scheduler: Any = None,
    loader: Any = None,
    extra: Any = None,
    step: int = 0,
) -> None:
    """Save model, optimizer, strategies and random states to a folder. Every worker must call it.

    Any number of workers, stages or shards can resume from it. The folder appears once it is complete and on disk, and
    only then replaces an existing checkpoint of that name. Anything else of that name raises `UsageError` and stays.

    scheduler, loader: anything with state_dict and load_state_dict.
    extra: JSON that `load` returns.
    """
    from fleetx.engine import checkpoint

    path = _path(folder, "fleet.save")
    if not isinstance(step, Integral) or isinstance(step, bool) or not 0 <= step < 2**53:
        raise UsageError(f"step = {step!r}: must be a whole number of at least 0")
    engine = current().find(model)
    extras = checkpoint.Extras(int(step), scheduler, loader, extra)
    peers.meet("fleet.save")
    snapshot = checkpoint.take(engine, extras, current().entries[engine].strategy.declared())
    poisoned = checkpoint.write(snapshot, path, engine.world)
    current().note("checkpoint", str(folder))
    if poisoned and engine.world.rank == 0:
        warn(f"{folder} was saved, but {poisoned} is not finite: training cannot continue from it")


def load(
    folder: str | Path, *, model: nn.Module | None = None, scheduler: Any = None, loader: Any = None
) -> dict[str, Any]:
    """Resume from a checkpoint of `fleet.save`, and return its step and extra. Every worker must call it.

    Call it after `fleet.distribute`. Every file is checked before anything is changed.
    """
    from fleetx.engine import checkpoint

    path = _path(folder, "fleet.load")
    engine = current().find(model)
    extras = checkpoint.Extras(0, scheduler, loader)
    peers.meet("fleet.load")
    checkpoint.load(engine, path, extras)
    current().note("resumed", str(folder))
    return {"step": extras.step, "extra": extras.loaded}


def latest(root: str | Path) -> Path | None:
    """The newest intact checkpoint under a folder, with every file as it was written, or None.

    The log names damaged ones. One worker can call it alone.
    """
    from fleetx.engine import checkpoint

    return checkpoint.latest(_path(root, "fleet.latest"), World(ProcessInfo(), torch.device("cpu")))


def keep_batch(strategy: DistributedStrategy, root: str | Path) -> DistributedStrategy:
    """The strategy with `gradient_merge` set so that an update has as many samples as in the newest checkpoint's run.

    Use it to resume with a different number of workers that feed batches of the same size. Every worker must call it,
    before `fleet.distribute`. Without a checkpoint, the strategy is returned unchanged.
    """
    from fleetx.engine import checkpoint

    world = current().here()
    found = checkpoint.latest(_path(root, "fleet.keep_batch"), world)
    if found is None:
        return strategy
    saved = checkpoint.described(found)
    share = saved.ranks // saved.replicas  # ranks that hold one copy of the model

    def merged(steps: int) -> int:
        found, rest = divmod(saved.replicas * steps * share, world.size)
        if rest or not found:
            raise StrategyError(
                f"{saved.replicas} replicas with {steps} merged steps cannot become {world.size // share} replicas "
                "with the same samples per update: choose a number of workers that divides them"
            )
        return found

    made = copy.deepcopy(strategy)
    before = saved.strategy.get("gradient_merge_configs", {})
    rampup = [[end, merged(k)] for end, k in before.get("rampup", [])]
    steps = before.get("k_steps", 1) if rampup else saved.window
    made.gradient_merge = {**made.gradient_merge_configs, "k_steps": merged(steps)} | (
        {"rampup": rampup} if rampup else {}
    )
    return made


def checkpoints(
    root: str | Path,
    *,
    every: int,
    keep: int = 3,
    steps: int | None = None,
    model: nn.Module | None = None,
    scheduler: Any = None,
    loader: Any = None,
    extra: dict[str, Any] | None = None,
    asynchronous: bool = False,
    when_busy: str = "wait",
) -> Checkpoints | Branch:
    """`for step in fleet.checkpoints("run", every=100)`: resume from the newest good checkpoint, save as training runs.

    Every worker must call it, after `fleet.distribute`; the call itself resumes. It saves every `every` steps, after
    `steps` and on SIGTERM, after which the process exits with code 143. A save that falls inside a merge window waits
    for the end of the window.

    keep: how many checkpoints to keep; 0 keeps all.
    scheduler, loader: anything with state_dict and load_state_dict.
    extra: a dict of JSON values. Each save stores its current content, and resuming restores it.
    asynchronous: copy at the step, and write in the background. A failure is raised in a later step.
    when_busy: if the previous save is still running, "wait" for it or "skip" this one.
    """
    from fleetx.engine import checkpoint

    path = _path(root, "fleet.checkpoints")
    engine = current().find(model)
    extras = checkpoint.Extras(0, scheduler, loader, extra)
    if (order := ordered()) is not None:  # a short run of `fleetx batch`
        return checkpoint.Branch(engine, path, extras, order)
    return checkpoint.Checkpoints(
        engine, path, current().entries[engine].strategy.declared(), every=every, keep=keep, steps=steps,
        extras=extras, asynchronous=asynchronous, when_busy=when_busy,
    )  # fmt: skip


def export(folder: str | Path, *, model: nn.Module | None = None, averaged: bool = False) -> None:
    """Write the model alone to `folder`/model.safetensors, under the names of torch, for other programs.

    Every worker must call it. transformers' `from_pretrained(folder)` reads it: the model's `config` is written too.
    Other files in the folder stay.

    averaged: write the average that `strategy.ema` keeps, as inside `fleet.averaged()`.
    """
    from fleetx.engine import checkpoint

    path = _path(folder, "fleet.export")
    engine = current().find(model)
    peers.meet("fleet.export")
    with averaging.averaged(model=model) if averaged else nullcontext():
        checkpoint.export(engine, path)
