"""`fleetx batch`: short runs of a script with different batches, all from one checkpoint."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fleetx.base.branch_order import BRANCH, Order
from fleetx.base.files import write_atomic
from fleetx.errors import UsageError
from fleetx.optim.schedule import batch_ratio
from fleetx.planner import critical_batch, plots
from fleetx.planner.critical_batch import BranchResult

SMOOTHED = 10  # the loss is averaged over 1 / SMOOTHED of the steps
_SAME = ("script", "arguments", "steps", "limit", "rule", "nproc_per_node", "device")  # comparable branches share these


def measure(
    script: str,
    arguments: Sequence[str],
    given: Mapping[str, Any],
    fleetrun: Callable[[list[str]], int],
    say: Callable[[str], None],
) -> str:
    """Run the branches that --output does not have yet, and return the result as text."""
    merges, rates = numbers("merges", given["merges"], int), numbers("rates", given["rates"], float)
    if 1 not in merges or len(merges) < 2:
        raise UsageError("--merges must include 1, the script's own batch, and at least one other, as in 1,2,4,8")
    if given["plot"] is not None:
        plots.check_plot()  # before anything is started
    steps = math.ceil(given["steps"] / max(merges)) * max(merges)  # whole updates of every batch
    output = Path(given["output"])
    settings = {key: list(arguments) if key == "arguments" else given.get(key) for key in _SAME} | {"script": script}
    settings["steps"] = steps
    known = _known(output, settings)
    todo = [(m, r) for m in merges for r in rates if (m, r) not in known]
    start, minutes = time.monotonic(), given["minutes"]
    for i, (merge, rate) in enumerate(todo):
        if minutes is not None and time.monotonic() - start > 60 * minutes:
            left = f"{len(todo) - i} branch{'es' if len(todo) - i > 1 else ''} left"
            say(f"--minutes {minutes:g} is over with {left}: repeat the command to continue")
            break
        share = batch_ratio(given["rule"], merge, 1) if given["rule"] != "none" else 1.0
        whole = steps if merge == 1 else math.ceil(steps * given["limit"] / max(merges)) * max(merges)
        say(f"branch {i + 1} of {len(todo)}: batch x {merge}, rate x {rate * share:.3g}, {whole} steps")
        known[merge, rate] = _run(Order(merge, rate * share, whole, ""), script, arguments, given, fleetrun)
        branches = [{"key": list(key), **asdict(branch)} for key, branch in known.items()]
        write_atomic(output, json.dumps({"settings": settings, "branches": branches}, indent=1) + "\n")
    if not any(merge == 1 for merge, _ in known):
        raise UsageError("no branch with the script's own batch has run yet: allow more --minutes")
    found = critical_batch.study(list(known.values()), steps, max(steps // SMOOTHED, 1))
    if given["plot"] is not None:
        critical_batch.plot(found, given["plot"])
    return critical_batch.text(found)


def _run(
    order: Order, script: str, arguments: Sequence[str], given: Mapping[str, Any], fleetrun: Callable[[list[str]], int]
) -> BranchResult:
    options = [f"--{name}={given[name]}" for name in ("nproc_per_node", "device") if given[name] is not None]
    options.append(f"--log_dir={Path(given['output']).with_suffix('.log')}")  # not the training's own folder
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "branch.json"
        with patch.dict(os.environ, {BRANCH: replace(order, output=str(result)).json()}):
            code = fleetrun([*options, script, *arguments])
        if code:
            raise UsageError(f"{script} ended with exit code {code}: see its error above")
        if not result.exists():
            raise UsageError(
                f"{script} ended before {order.steps} steps, or does not use fleet.checkpoints: loop over "
                "`for step in fleet.checkpoints(root, every=...)`, let the data repeat, or lower --steps or --limit"
            )
        found = json.loads(result.read_text())
    found.pop("resumed")
    return BranchResult(merge=order.merge, rate=order.rate, **found)


def _known(output: Path, settings: Mapping[str, Any]) -> dict[tuple[int, float], BranchResult]:
    """What an earlier call has measured."""
    if not output.exists():
        return {}
    try:
        saved = json.loads(output.read_text())
        different = [key for key in settings if saved["settings"].get(key) != settings[key]]
        branches = {tuple(b.pop("key")): BranchResult(**b) for b in saved["branches"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{output} is not a file of `fleetx batch`: choose another --output") from error
    if different:
        raise UsageError(
            f"{output} was measured with a different --{different[0]}: choose another --output, or remove the file"
        )
    return branches


def numbers(name: str, given: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        found = [kind(part) for part in given.split(",")]
    except ValueError:
        found = []
    if not found or any(not 0 < n < math.inf for n in found):
        raise UsageError(f"--{name} {given}: must be numbers above 0, separated by commas")
    return sorted(set(found))
