"""Predicts the peak memory of forward and backward of a sharded model.

A step on fake tensors allocates and frees what FSDP does for each segment:

    before its forward, and stage 3: again before its backward   the collective's output, which is then copied out
    after its forward                                            stage 3: freed; stage 1, 2: kept for backward
    after its backward                                           freed; its gradients are copied into the input of the
                                                                 reduce-scatter, which lives until the next segment's

In backward, FSDP starts to gather the next segment while the current one computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fleetx.base import seams
from fleetx.base.module_names import named_modules
from fleetx.base.trees import map_tensors, tensors_of
from fleetx.base.wrapping import Layer, wrap
from fleetx.engine.taps import tap
from fleetx.measure.fake_step import FakeStep, TrainingStep, preserve_rng
from fleetx.measure.op_scratch import OpScratch, with_scratch
from fleetx.measure.tracker import Tracker


def running(step: TrainingStep, names: list[str], part: Any, ranks: int, install: Any = None) -> int:
    """Peak bytes of forward and backward without what the rank holds between steps: parameters and optimizer state.

    names: the modules that are segments, besides the root. ranks: how many ranks share the parameters.
    """

    def run(scratch: OpScratch) -> int:
        fake = FakeStep(step)
        with fake.mode, Tracker(scratch) as tracker:
            for p in fake.model.parameters():
                tracker.ignore(p)  # what is gathered is counted instead
            for t in (*fake.model.buffers(), *tensors_of((fake.args, fake.kwargs, fake.targets))):
                tracker.see(t)
            forward_context = fake.engine.forward_context  # creating the engine also installs its hooks
            gathering = Gathering(fake.model, names, part, ranks, merged=step.kept_gradients)
            forward: Any = install(fake.model, forward_context) if install is not None else torch.enable_grad
            fake.run(forward)
            gathering.end()
        return tracker.peak

    with preserve_rng(), torch.enable_grad():
        return with_scratch(step.device, run)


class Gathering:
    """What FSDP holds of each segment while a step runs."""

    def __init__(self, model: nn.Module, names: list[str], part: Any, ranks: int, *, merged: bool):
        modules = dict(named_modules(model))
        self._reshard, self._ranks = part.stage == 3, ranks
        self._coded = part.gradient_bits / 32 if part.gradient_bits < 32 else 0.0
        self._all: list[_SegmentMemory] = []
        self._order: list[_SegmentMemory] = []  # in the order in which the forward calls them
        self._copied: Tensor | None = None  # the last output of a collective, which FSDP frees at the next one
        self._scattered: Tensor | None = None  # the input of the last reduce-scatter
        self._shards: list[Tensor] = []  # of gradients
        taken: set[int] = set()
        for module in (*(modules[name] for name in names), model):
            params = [p for p in module.parameters() if id(p) not in taken]
            taken |= {id(p) for p in params}
            segment = _SegmentMemory(params)
            if merged:
                self._shards.append(torch.empty(segment.size // ranks, dtype=torch.uint8))
            wrap(module, Layer.STAGE, partial(self._call, segment))
            self._all.append(segment)
        self._merged = merged

    def _call(self, segment: _SegmentMemory, module: nn.Module, inner: Any, args: Any, kwargs: Any) -> Any:
        self._gather(segment)
        if segment not in self._order:
            self._order.append(segment)
        args, kwargs = map_tensors(lambda t: _watched(t, partial(self._after_backward, segment)), (args, kwargs))
        out = inner(*args, **kwargs)
        if seams.graph_task_id() == -1 and self._reshard:  # else a part of the forward is recomputed in backward
            segment.full = None
        return map_tensors(lambda t: _watched(t, partial(self._before_backward, segment)), out)

    def _before_backward(self, segment: _SegmentMemory, grad: Tensor) -> Tensor:
        self._gather(segment)
        earlier = self._order[: self._order.index(segment)]
        if earlier and earlier[-1].full is None and not earlier[-1].reduced:
            earlier[-1].coming = torch.empty(earlier[-1].size, dtype=torch.uint8)
        return grad

    def _gather(self, segment: _SegmentMemory) -> None:
        if segment.full is not None:
            return
        self._copied = None
        output = segment.coming if segment.coming is not None else torch.empty(segment.size, dtype=torch.uint8)
        segment.full, segment.coming = torch.empty(segment.size, dtype=torch.uint8), None
        self._copied = output

    def _after_backward(self, segment: _SegmentMemory, grad: Tensor) -> Tensor:
        self._reduce(segment)
        return grad

    def _reduce(self, segment: _SegmentMemory) -> None:
        segment.full, segment.reduced, self._scattered = None, True, None
        if all(p.grad is None for p in segment.params):
            return
        self._scattered = torch.empty(segment.size, dtype=torch.uint8)
        for p in segment.params:
            p.grad = None
        if self._coded:  # blocks, what is sent and received, and the sum
            torch.empty(int(segment.size * (2 + 2 * self._coded)), dtype=torch.uint8)
        shard = torch.empty(segment.size // self._ranks, dtype=torch.uint8)
        if not self._merged:  # else it is added to the existing one
            self._shards.append(shard)

    def end(self) -> None:
        """After backward, reduce the segments that no hook noticed, because their inputs have no gradient."""
        for segment in self._all:
            self._reduce(segment)


def _watched(t: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    return tap(t, act) if t.requires_grad else t


class _SegmentMemory:
    """The parameters that are gathered together."""

    def __init__(self, params: list[nn.Parameter]):
        self.params = params
        self.size = sum(p.nbytes for p in params)
        self.reduced = False
        self.full: Tensor | None = None
        self.coming: Tensor | None = None  # while it is being gathered
