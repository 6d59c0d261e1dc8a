"""What has happened in the round of one model, and the line that it becomes when its numbers are known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fleetx.base.trees import samples_in, tensors_of
from fleetx.engine.dtensors import local
from fleetx.record.schema import TIMES
from fleetx.record.stopwatch import Mark, Stopwatch

LANE = {"communication": "wait"}  # of a span in a trace; the others are computed


class Span(NamedTuple):
    """Time that belongs to `kind`, not to `within`, in whose span it lies. A tuple, because a step makes a dozen."""

    kind: str  # of TIMES, or "" if it is only drawn
    start: Mark
    end: Mark
    within: str = ""
    name: str = ""  # in a trace
    lane: str = ""

    @property
    def seconds(self) -> float:
        return Stopwatch.seconds(self.start, self.end)


@dataclass
class Tally:
    """Since the last round of a model ended."""

    losses: list[Tensor] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    norm: Tensor | None = None
    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def feed(self, inputs: Any) -> None:
        """A batch enters the model in training."""
        self.samples += samples_in(inputs)
        whole = (t for t in tensors_of(inputs) if t.dim() == 2 and not t.is_floating_point() and not t.is_complex())
        words = next((t for t in whole if t.dtype is not torch.bool), None)
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
        """Have the device send the numbers, without waiting for them."""
        found = [local(t).detach().float().reshape(()) for t in (*self.tally.losses, self._norm) if t is not None]
        if found:
            numbers = torch.stack([t.to(found[0].device) for t in found])
            self.copied = torch.empty(len(found), pin_memory=True).copy_(numbers, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record()

    @property
    def _norm(self) -> Tensor | None:
        return self.tally.norm

    def known(self) -> bool:
        return self.event is None or bool(self.event.query())

    def settle(self) -> dict[str, Any]:
        """The line. Waits for the device, unless everything is known."""
        tally, line = self.tally, self.line
        if self.event is not None:
            self.event.synchronize()
            numbers = [] if self.copied is None else self.copied.tolist()
            losses, norm = numbers[: len(tally.losses)], numbers[len(tally.losses) :]
        else:
            losses = [float(local(t)) for t in tally.losses]
            norm = [] if tally.norm is None else [float(tally.norm)]
        if losses:
            line["loss"] = sum(losses) / len(losses)
        if norm:
            line["norm"] = norm[0]
        line["time"] = {kind: round(seconds, 6) for kind, seconds in times(tally.spans).items()}
        line["seconds"] = round(sum(line["time"].values()), 6)
        return line


def times(spans: Iterable[Span]) -> dict[str, float]:
    found = dict.fromkeys(TIMES, 0.0)
    for span in spans:
        if span.kind:
            on_host = type(span.start) is float  # asked here, because calls add up
            seconds = span.end - span.start if on_host else span.seconds
            found[span.kind] += seconds
            if span.within:
                found[span.within] -= seconds
    return {kind: max(seconds, 0.0) for kind, seconds in found.items()}


def trace(spans: list[Span]) -> list[list[Any]]:
    """[lane, name, start, seconds] of each span that has a name, from the beginning of the first one on."""
    if not spans:
        return []
    begin, found = spans[0].start, []
    for span in spans:
        if span.name:
            lane = span.lane or LANE.get(span.kind, "compute")
            found.append([lane, span.name, round(Stopwatch.seconds(begin, span.start), 6), round(span.seconds, 6)])
    return found
