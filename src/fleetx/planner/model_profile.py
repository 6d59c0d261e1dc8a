"""Times and bytes of a model on a device: plain data without tensors, to be stored, sent to other ranks and scaled."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from fleetx.parts.pipeline.cut_points import partition
from fleetx.strategy.part import Part


@dataclass(frozen=True)
class LinearFit:
    """base + slope * n"""

    base: float
    slope: float

    def at(self, n: float) -> float:
        return self.base + self.slope * n

    def scaled(self, factor: float) -> LinearFit:
        return LinearFit(self.base * factor, self.slope * factor)

    @staticmethod
    def through(points: Sequence[tuple[float, float]]) -> LinearFit:
        """Fit by least squares of relative errors: small batches count as much as large ones. Never negative."""
        if len(points) == 1:
            ((n, value),) = points
            return LinearFit(0.0, value / n)
        weighted = [(1 / y**2, x, y) for x, y in points]
        total = sum(w for w, _, _ in weighted)
        mean_x = sum(w * x for w, x, _ in weighted) / total
        mean_y = sum(w * y for w, _, y in weighted) / total
        covariance = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in weighted)
        slope = max(covariance / sum(w * (x - mean_x) ** 2 for w, x, _ in weighted), 0.0)
        base = mean_y - slope * mean_x
        if base < 0:  # fit a line through the origin instead
            return LinearFit(0.0, sum(w * x * y for w, x, y in weighted) / sum(w * x * x for w, x, _ in weighted))
        return LinearFit(base, slope)


@dataclass(frozen=True)
class BlockShare:
    """One block of the model, in call order."""

    name: str
    seconds: float  # forward and backward, measured alone
    gradients: int  # bytes
    border: int  # bytes that a stage starting here receives, per sample
    saved: int  # bytes that it keeps for backward, per sample
    can_start_stage: bool
    tied: tuple[tuple[int, int, int], ...] = ()  # weights shared with an earlier block: (block, bytes, parameter)


_ZERO = LinearFit(0.0, 0.0)


@dataclass(frozen=True)
class ForwardProfile:
    """Forward and backward under one set of parts that change the forward, such as `amp`; or why they do not run."""

    forward: LinearFit = _ZERO  # seconds for a batch of n
    backward: LinearFit = _ZERO
    peak: LinearFit = _ZERO  # bytes of forward and backward, with gradients allocated from the start
    border_ratio: float = 1.0  # bytes between blocks, relative to those without these parts
    cast_bytes: float = 0.0  # copies of the parameters in another dtype, one per batch in flight
    error: str = ""

    def faster(self, factor: float) -> ForwardProfile:
        return replace(self, forward=self.forward.scaled(1 / factor), backward=self.backward.scaled(1 / factor))


@dataclass(frozen=True)
class ModelProfile:
    samples: int  # in the batch that was measured
    declared: ForwardProfile  # with the parts that the user declared
    update: float  # seconds of optimizer.step()
    parameters: int  # bytes
    gradients: int
    state: int
    buffers: int
    update_peak: int  # bytes
    tensors: int = 0  # trainable parameters
    largest_segment: int = 0  # bytes of the largest module that FSDP would gather at once
    averaging: int = 0  # bytes in flight while parameters are averaged
    blocks: tuple[BlockShare, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()  # of the parameters
    variants: dict[str, ForwardProfile] = field(default_factory=dict)  # by `forward_key`

    @staticmethod
    def parse(data: Any) -> ModelProfile:
        """The inverse of `dataclasses.asdict`. Raises ValueError."""
        return TypeAdapter(ModelProfile).validate_python(data)

    @property
    def fixed(self) -> int:
        return self.parameters + self.gradients + self.state + self.buffers

    def forward_with(self, parts: Iterable[Part]) -> ForwardProfile:
        return self.variants.get(forward_key(parts), self.declared)

    def faster(self, factor: float) -> ModelProfile:
        """The profile on a device that computes `factor` times as fast."""
        variants = {key: variant.faster(factor) for key, variant in self.variants.items()}
        return replace(self, declared=self.declared.faster(factor), update=self.update / factor, variants=variants)

    @cached_property
    def _stages(self) -> dict[int, list[list[BlockShare]] | None]:
        return {}

    def stages(self, number: int) -> list[list[BlockShare]] | None:
        """The blocks of each stage of a balanced pipeline, or None if the model cannot be cut into that many."""
        if number not in self._stages:
            self._stages[number] = self._balanced(number)
        return self._stages[number]

    def _balanced(self, number: int) -> list[list[BlockShare]] | None:
        starts = [i for i, block in enumerate(self.blocks) if i and block.can_start_stage]
        if len(starts) < number - 1:
            return None
        times = [block.seconds for block in self.blocks]
        sizes = [float(block.saved) for block in self.blocks]
        cuts = [0, *partition(times, sizes, number, starts), len(self.blocks)]
        return [list(self.blocks[low:high]) for low, high in itertools.pairwise(cuts)]


def tied_bytes(stages: Sequence[Sequence[BlockShare]]) -> list[int]:
    """For each stage, the bytes of the weights that an earlier stage holds too."""
    result, start = [], 0
    for stage in stages:
        shared = {(parameter, size) for block in stage for first, size, parameter in block.tied if first < start}
        result.append(sum(size for _, size in shared))
        start += len(stage)
    return result


def forward_key(parts: Iterable[Part]) -> str:
    """A key for the parts that change how a forward runs; empty if none of them does."""
    return "; ".join(sorted(repr(part) for part in parts if part.changes_forward))
