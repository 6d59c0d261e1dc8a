"""What happened in a round of one model, and the line that it becomes once its numbers are known."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from fleetx.base import seams
from fleetx.base.trees import samples_of, tensors_of
from fleetx.engine.dtensors import local
from fleetx.record.schema import TIMES

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
LANE = {"communication": "wait"}  # of a span in a trace, by kind; "compute" for all others


Mark = Any  # seconds on the host, or an event on the device


class Stopwatch:
    """Seconds between two marks. On CUDA, marks are events on the device, and the host does not wait for them."""

    def __init__(self, device: torch.device):
        self._device = device if device.type == "cuda" else None

    def mark(self) -> Mark:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @staticmethod
    def seconds(start: Mark, end: Mark) -> float:
        if isinstance(start, float):
            return float(end - start)
        return float(start.elapsed_time(end)) / 1000


class Span(NamedTuple):
    """Time that counts as `kind`, not as `within`, the kind of the span around it. A tuple, to be fast."""

    kind: str  # of TIMES, or "" if it is only drawn
    start: Mark
    end: Mark
    within: str = ""
    name: str = ""  # in a trace
    lane: str = ""

    @property
    def seconds(self) -> float:
        return Stopwatch.seconds(self.start, self.end)


class Losses:
    """The loss of a script that calls `loss.backward()`, which the engine would not see otherwise.

    `Tensor.backward` calls `torch.autograd.backward`, which is replaced while something is recorded.
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None  # the root of the last backward, if it was a single number
        self._plain = torch.autograd.backward

        @functools.wraps(self._plain)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            root = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
            if isinstance(root, Tensor) and root.numel() == 1:
                self.last = root.detach()
            if not seams.profiler_enabled():
                return self._plain(tensors, *args, **kwargs)
            with record_function("fleetx backward"):
                return self._plain(tensors, *args, **kwargs)

        self._ours = backward
        torch.autograd.backward = backward

    def take(self) -> Tensor | None:
        found, self.last = self.last, None
        return found

    def close(self) -> None:
        if torch.autograd.backward is self._ours:  # else other code has wrapped ours since, and still calls it
            torch.autograd.backward = self._plain


@dataclass
class Tally:
    """What happened since the last round of a model ended."""

    losses: list[Tensor] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    norm: Tensor | None = None
    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def feed(self, inputs: Any) -> None:
        """A batch enters the model in training."""
        found = tensors_of(inputs)
        self.samples += samples_of(found)
        words = next((t for t in found if t.dtype in _WHOLE and t.dim() == 2), None)
        self.tokens += 0 if words is None else words.numel()


@dataclass
class Ended:
    """A round whose numbers may still be on the device."""

    line: dict[str, Any]
    tally: Tally
    trace: bool = False
    copied: Tensor | None = None  # its loss and norm, on their way to the host
    event: Any = None

    def ask(self) -> None:
        """Start to copy the numbers to the host, without waiting for them."""
        found = [local(t).detach().float().reshape(()) for t in (*self.tally.losses, self.tally.norm) if t is not None]
        if found:
            numbers = torch.stack([t.to(found[0].device) for t in found])
            self.copied = torch.empty(len(found), pin_memory=True).copy_(numbers, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record()

    def known(self) -> bool:
        return self.event is None or bool(self.event.query())

    def settle(self) -> dict[str, Any]:
        """Complete the line and return it. Waits for the device if the numbers are not known yet."""
        tally, line = self.tally, self.line
        if self.event is not None:
            self.event.synchronize()
            numbers = [] if self.copied is None else self.copied.tolist()
            losses, norm = numbers[: len(tally.losses)], numbers[len(tally.losses) :]
        else:
            losses = [local(t).item() for t in tally.losses]
            norm = [] if tally.norm is None else [float(tally.norm)]
        if losses:
            line["loss"] = sum(losses) / len(losses)
        if norm:
            line["norm"] = norm[0]
        found = line["time"] = times(tally.spans)
        line["seconds"] = sum(found.values())
        return line


def times(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by kind. Not rounded, because this delays the training: the writing thread rounds."""
    found = dict.fromkeys(TIMES, 0.0)
    for kind, start, end, within, _, _ in spans:
        if kind:
            on_host = type(start) is float  # checked inline, because calls add up
            seconds = end - start if on_host else Stopwatch.seconds(start, end)
            found[kind] += seconds
            if within:
                found[within] -= seconds
    for kind, seconds in found.items():
        if seconds < 0.0:
            found[kind] = 0.0
    return found


def trace(spans: list[Span]) -> list[list[Any]]:
    """[lane, name, start, seconds] of each span that has a name, from the beginning of the first one on."""
    starts = [Stopwatch.seconds(spans[0].start, span.start) for span in spans]
    first = min(starts, default=0.0)  # a wait is added before the span around it
    return [
        [span.lane or LANE.get(span.kind, "compute"), span.name, round(start - first, 6), round(span.seconds, 6)]
        for span, start in zip(spans, starts, strict=True)
        if span.name
    ]


def is_traced(number: int) -> bool:
    """Rounds 3, 10, 30, 100 ...: the same on all ranks, so that they can be drawn together."""
    while number >= 10 and number % 10 == 0:
        number //= 10
    return number in (1, 3)


def state_bytes(optimizer: Optimizer) -> int:
    values = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    return sum(local(v).nbytes for v in values)
