"""Peak memory of real calls, as reported by torch's allocator."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from fleetx.base import seams

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise torch's profiler prints two lines per run
Measured = Callable[[], Any]
_MARK = "fleetx memory "
log = logging.getLogger(__name__)


def peak(call: Measured, device: torch.device) -> int:
    """Peak bytes allocated while `call` runs, above what was allocated before."""
    return peaks([lambda: call], device)[0]


def peaks(calls: Sequence[Callable[[], Measured]], device: torch.device) -> list[int]:
    """The peak of each call. Each item prepares its inputs and returns the call to measure, whose result is dropped."""
    if device.type == "cuda":
        return [_peak_on_cuda(prepare(), device) for prepare in calls]
    if seams.profiler_enabled():  # starting a second profiler would end the user's
        log.warning("a profiler is running, so scratch memory of operations is not measured: predictions may be low")
        return [0] * len(calls)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
        for number, prepare in enumerate(calls):
            call = prepare()
            with record_function(f"{_MARK}{number}"):
                call()
            del call
    return _peaks_in(profiler.profiler.kineto_results.events(), len(calls))


def _peak_on_cuda(call: Measured, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peaks_in(events: Sequence[Any], calls: int) -> list[int]:
    spans = [(0, 0)] * calls
    changes: list[tuple[int, int]] = []
    for event in events:
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(_MARK):
            spans[int(event.name().removeprefix(_MARK))] = event.start_ns(), event.start_ns() + event.duration_ns()
    changes.sort()
    out, i, live = [], 0, 0
    for begin, end in spans:
        while i < len(changes) and changes[i][0] < begin:
            live += changes[i][1]
            i += 1
        before = highest = live
        while i < len(changes) and changes[i][0] <= end:
            live += changes[i][1]
            highest = max(highest, live)
            i += 1
        out.append(highest - before)
    return out
