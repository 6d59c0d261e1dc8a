"""What a model asks of a device: plain data, which can be stored, told to other ranks, and asked about elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fleetx.parts.pipeline.partition import partition


@dataclass(frozen=True)
class LinearFit:
    """base + slope * n"""

    base: float
    slope: float

    def at(self, n: float) -> float:
        return self.base + self.slope * n

    def times(self, factor: float) -> LinearFit:
        return LinearFit(self.base * factor, self.slope * factor)

    @staticmethod
    def through(points: Sequence[tuple[float, float]]) -> LinearFit:
        """Of least squares, relative to the values: small batches count as much as large ones. Never falls."""
        if len(points) == 1:
            ((n, value),) = points
            return LinearFit(0.0, value / n)
        weights = [1 / value**2 for _, value in points]
        total = sum(weights)
        n = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
        mean = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
        above = sum(w * (x - n) * (y - mean) for w, (x, y) in zip(weights, points, strict=True))
        below = sum(w * (x - n) ** 2 for w, (x, _) in zip(weights, points, strict=True))
        slope = max(above / below, 0.0)
        base = mean - slope * n
        if base < 0:  # through the origin instead
            squares = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
            return LinearFit(0.0, sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / squares)
        return LinearFit(base, slope)


@dataclass(frozen=True)
class Piece:
    """A block of the model, in the order of the calls."""

    name: str
    seconds: float  # forward and backward, alone
    gradients: int  # bytes
    border: int  # bytes that it hands on, of one sample
    saved: int  # bytes that it keeps for backward, of one sample
    starts: bool  # may a stage begin with it?
    tied: tuple[tuple[int, int, int], ...] = ()  # weights that an earlier piece has too: its number, bytes, which


_NEVER = LinearFit(0.0, 0.0)


@dataclass(frozen=True)
class Way:
    """How a forward runs, with the parts that change it (`amp`) or without; or why it does not run."""

    forward: LinearFit = _NEVER  # seconds, of a batch of n
    backward: LinearFit = _NEVER
    peak: LinearFit = _NEVER  # bytes of forward and backward, gradients there from the beginning
    border: float = 1.0  # of the bytes that modules hand on without these parts
    casts: float = 0.0  # bytes of the parameters in another type, of which each batch under way has its own
    error: str = ""

    def faster(self, factor: float) -> Way:
        return replace(self, forward=self.forward.times(1 / factor), backward=self.backward.times(1 / factor))


@dataclass(frozen=True)
class Work:
    samples: int  # in the batch that was probed
    plain: Way  # with the user's own parts
    update: float  # seconds
    parameters: int  # bytes
    gradients: int
    state: int
    buffers: int
    floor: int  # bytes of an update
    tensors: int = 0  # that have gradients
    segment: int = 0  # bytes of the largest piece that FSDP would gather as one
    averaged: int = 0  # bytes that are under way at once when parameters are averaged
    pieces: tuple[Piece, ...] = ()
    ways: dict[str, Way] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ()  # of the parameters
    _cuts: dict[int, list[list[Piece]] | None] = field(init=False, default_factory=dict, compare=False, repr=False)

    @property
    def fixed(self) -> int:
        return self.parameters + self.gradients + self.state + self.buffers

    def way(self, name: str) -> Way:
        return self.ways.get(name, self.plain)

    def faster(self, factor: float) -> Work:
        """On a device that computes so many times faster."""
        ways = {name: way.faster(factor) for name, way in self.ways.items()}
        return replace(self, plain=self.plain.faster(factor), update=self.update / factor, ways=ways)

    def stages(self, number: int) -> list[list[Piece]] | None:
        """The pieces of each stage, cut where it is balanced; None: there are not so many places to cut at."""
        if number not in self._cuts:
            self._cuts[number] = self._balanced(number)
        return self._cuts[number]

    def _balanced(self, number: int) -> list[list[Piece]] | None:
        starts = [i for i, piece in enumerate(self.pieces) if i and piece.starts]
        if len(starts) < number - 1:
            return None
        times = [piece.seconds for piece in self.pieces]
        sizes = [float(piece.saved) for piece in self.pieces]
        cuts = [0, *partition(times, sizes, number, starts), len(self.pieces)]
        return [list(self.pieces[low:high]) for low, high in itertools.pairwise(cuts)]

    def tied(self, stages: Sequence[Sequence[Piece]]) -> list[int]:
        """Bytes of the weights that each stage has beside an earlier one."""
        ends = list(itertools.accumulate(len(stage) for stage in stages))
        found = []
        for stage, end in zip(stages, ends, strict=True):
            own = {(which, size) for piece in stage for first, size, which in piece.tied if first < end - len(stage)}
            found.append(sum(size for _, size in own))
        return found

    def written(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "_cuts"}

    @staticmethod
    def of(data: dict[str, Any]) -> Work:
        ways = {name: _way(way) for name, way in data["ways"].items()}
        pieces = tuple(Piece(**{**piece, "tied": tuple(map(tuple, piece["tied"]))}) for piece in data["pieces"])
        shapes = tuple(map(tuple, data["shapes"]))
        return Work(**{**data, "plain": _way(data["plain"]), "ways": ways, "pieces": pieces, "shapes": shapes})


def _way(data: dict[str, Any]) -> Way:
    forward, backward, peak = (LinearFit(**data[key]) for key in ("forward", "backward", "peak"))
    return Way(forward, backward, peak, data["border"], data["casts"], data["error"])
