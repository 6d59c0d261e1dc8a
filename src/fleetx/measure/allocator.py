"""The most bytes that were allocated at once while something ran: what torch's own allocator says."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would write two lines each time
Call = Callable[[], Any]
_MARK = "fleetx memory "
log = logging.getLogger(__name__)


def peak(call: Call, device: torch.device) -> int:
    """Above what was there before."""
    return peaks([lambda: call], device)[0]


def peaks(calls: Sequence[Callable[[], Call]], device: torch.device) -> list[int]:
    """Of each, made ready and run one after the other. What they return is let go at once."""
    if device.type == "cuda":
        return [_of_device(ready(), device) for ready in calls]
    if torch._C._autograd._profiler_enabled():  # the user's: it would be ended by another
        log.warning("a profiler is on, so what operations hold inside is not measured: predictions may be low")
        return [0] * len(calls)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
        for number, ready in enumerate(calls):
            call = ready()
            with record_function(f"{_MARK}{number}"):
                call()
            del call
    return _read(profiler.profiler.kineto_results.events(), len(calls))


def _of_device(call: Call, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _read(events: Sequence[Any], calls: int) -> list[int]:
    marks = [(0, 0)] * calls
    changes: list[tuple[int, int]] = []
    for event in events:
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(_MARK):
            marks[int(event.name().removeprefix(_MARK))] = event.start_ns(), event.start_ns() + event.duration_ns()
    changes.sort()
    out, at, total = [], 0, 0
    for begin, end in marks:
        while at < len(changes) and changes[at][0] < begin:
            total += changes[at][1]
            at += 1
        before = most = total
        while at < len(changes) and changes[at][0] <= end:
            total += changes[at][1]
            most = max(most, total)
            at += 1
        out.append(most - before)
    return out
