"""FLEETX_DEBUG=collectives: before every collective of the script, the ranks compare what they are about to do.

gloo silently mixes up calls that differ in order, reduction or type, and aborts the process if small tensors differ in
size. fleetx's own collectives are in order by construction and are not compared. Slow: for debugging only.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fleetx.base import seams
from fleetx.base.user_line import is_users
from fleetx.comm.world import listed
from fleetx.errors import UsageError, WorldError

SWITCH = "FLEETX_DEBUG"
COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all_single", "barrier",
)  # fmt: skip
_calls: Counter[str] = Counter()  # in each group
POLL = 0.005


def start(timeout: timedelta) -> None:
    """Start comparing, if the user asks for it."""
    asked = os.environ.get(SWITCH, "")
    if asked not in ("", "0", "collectives"):
        raise UsageError(f"{SWITCH}={asked}: must be collectives")
    if asked != "collectives":
        return
    for name in COLLECTIVES:
        if not hasattr(getattr(dist, name), "compared"):
            setattr(dist, name, _compared(name, getattr(dist, name), timeout.total_seconds()))


def _compared(name: str, call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if is_users(frame):
            where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            given = signature.bind(*args, **kwargs).arguments
            shown = [f"{key}={_shown(value)}" for key, value in given.items() if key not in ("group", "async_op")]
            _compare(f"{name}({', '.join(shown)}) at {where}", given.get("group") or dist.group.WORLD, seconds)
        return call(*args, **kwargs)

    wrapper.compared = True  # type: ignore[attr-defined]
    return wrapper


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value)


def _compare(mine: str, group: Any, seconds: float) -> None:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    store, ranks = seams.default_store(), dist.get_process_group_ranks(group)
    _calls[group.group_name] += 1
    prefix = f"fleetx/debug/{group.group_name}/{_calls[group.group_name]}"
    store.set(f"{prefix}/{dist.get_rank()}", json.dumps(mine))
    keys, end = [f"{prefix}/{rank}" for rank in ranks], time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > end:
            absent = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
            raise WorldError(
                f"rank {dist.get_rank()} is in {mine}, but {listed(absent)} did not join within {seconds:g} s: every "
                "rank must make the same calls in order"
            )
        time.sleep(POLL)
    told = [json.loads(store.get(key)) for key in keys]
    if len(set(told)) > 1:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, told, strict=True))
        raise UsageError(f"the ranks call different collectives: {said}. Every rank must make the same calls in order")
