"""What a record contains. No torch here.

`RUN/rank0.jsonl` has one JSON object per line. Rank 0 writes it, and gathers into it what the other ranks measured.
With `every_rank`, `RUN/rank1.jsonl` and so on have the rounds of the others too. A resumed or restarted run appends.

Every line has `kind`, `t` (seconds since 1970) and `rank`. A number that is not finite is the string "nan", "inf" or
"-inf", because JSON has no such numbers. A key whose value is unknown is left out. The kinds:

    start   a process began to record: `schema`, `ranks`, `device`, `host`, `machine`, `versions`, `threads`, `command`
            (of the launcher, if it is fleetrun or torchrun), `folder`, `environment`, `restart` (how often the launcher
            has restarted the workers)
    plan    a model was distributed; again after its first round, when every strategy has decided: `model` (its number),
            `name`, `replicas` (different batches per step), `window` (steps per round), `strategy` (as in its YAML
            file), `acts` ([stage, switch, what it does and why there]), `explain`, `parameters` (their number), `bytes`
            on this rank (of `parameters`, `gradients`, and `kept` by strategies), `predicted` (peak bytes of a step),
            or `unpredicted` (why there is no prediction), `divided` (whether no rank holds the whole model)
    round   a round ended: `model`, `round`, `updated` (whether an update was applied), `seconds`, `time` (seconds by
            TIMES), `steps`, `samples` and `tokens` of this rank, `rate` (learning rate), `loss` (mean over its steps,
            before the update), `scale` (of the loss), `k` (the period that adaptive_localsgd chose), `norm` (of the
            gradient), `sent` (bytes over TCP) and `peak` (bytes, so far): as often as 0.3 % of the time allows
    rank    what a rank has used since it started: `rounds`, `seconds`, `time`, `samples`, `sent` (bytes over TCP),
            `peak` (bytes), `before` (bytes held when its model was distributed), `optimizer` (bytes of its state),
            `predicted` (peak bytes of a step, if this rank has predicted its own),
            `first` (the `time` of its first round, which sets everything up), `host`
    event   `what` (see EVENTS), `round`, `text`
    value   `round`, `values`: numbers that the script gave to `fleet.log`
    trace   one round of one rank in detail: `model`, `round`, `spans` ([lane, name, start, seconds], from `t` on; lanes
            are `compute`, `wait`, `stage` for a pipeline and `act` for what strategies do)
"""

from __future__ import annotations

import json
import math
from typing import Any

SCHEMA = 1

# Where the time of a round goes. `data` is what the script does between a step and the next forward: mostly, it waits
# for its loader. `communication` is time spent waiting for other ranks, not hidden by computation. `other` is
# evaluating and saving.
TIMES = ("data", "forward_backward", "communication", "update", "other")

# What a line must have to be read; other keys may be missing.
_ANY = {"t": int | float, "rank": int}
KEYS: dict[str, dict[str, Any]] = {
    "start": _ANY | {
        "schema": int, "ranks": int, "device": str, "host": str, "machine": str, "versions": dict, "threads": int,
        "command": list, "folder": str, "environment": dict,
    },
    "plan": _ANY | {
        "model": int, "name": str, "replicas": int, "window": int, "strategy": dict, "acts": list, "explain": str,
        "parameters": int, "bytes": dict,
    },
    "round": _ANY | {"model": int, "round": int, "seconds": int | float, "time": dict, "samples": int},
    "rank": _ANY | {"rounds": int, "time": dict},
    "event": _ANY | {"what": str, "round": int},
    "value": _ANY | {"round": int, "values": dict},
    "trace": _ANY | {"model": int, "round": int, "spans": list},
}  # fmt: skip
INSIDE = {"time": TIMES, "bytes": ("parameters", "gradients", "kept")}  # numbers that these must contain

EVENTS = {
    "overflow": "a float16 gradient overflowed: the update was skipped, as the loss scale expects",
    "skipped": "a gradient was not finite: the update was skipped",
    "checkpoint": "a checkpoint was saved",
    "resumed": "the training resumed from a checkpoint",
    "restored": "a gradient was not finite: the last good checkpoint was restored",
    "restart": "the launcher restarted the workers",
    "fault": "an error ended the training",
    "end": "the training ended",
}

_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # json.dumps would create one for each line
_ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(line: dict[str, Any]) -> str:
    try:
        return _ENCODER.encode(line)
    except ValueError:
        return _ENCODER.encode(_plain(line))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def number(value: Any) -> float | None:
    """The number that a value of a line stands for, including "nan", "inf" and "-inf"; None if it is not a number."""
    if isinstance(value, str):
        return _ODD.get(value)
    return float(value) if isinstance(value, int | float) else None
