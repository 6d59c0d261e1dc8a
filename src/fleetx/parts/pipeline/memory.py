"""Predicts the peak memory of forward and backward on this rank.

Its stages run on fake tensors in the order of the schedule, with torch's buffers for what arrives from other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from fleetx.base.seams import FakeTensorMode
from fleetx.base.trees import tensors_of
from fleetx.engine.context import StepInput
from fleetx.measure.fake_step import TrainingStep, estimate, preserve_rng
from fleetx.measure.op_scratch import OpScratch, with_scratch
from fleetx.measure.tracker import Tracker
from fleetx.parts.pipeline.stage_params import StageParams
from fleetx.parts.pipeline.stages import StageForward
from fleetx.parts.pipeline.timeline import Action
from fleetx.parts.pipeline.trace import Boundary, Interceptor, Trace, without_data

RunForward = Callable[[StepInput, Interceptor], Tensor]


class _WithoutData(StageForward):
    def check(self, loss: Tensor) -> None:
        """Nothing to check: no stage has data here."""


def running(
    model: nn.Module, params: StageParams, trace: Trace, order: Sequence[Action], batches: list[StepInput],
    forward: RunForward, device: torch.device, *, merged: bool,
) -> int:  # fmt: skip
    """Peak bytes of forward and backward of all micro-batches, including parameters and gradients.

    order: the actions of this rank. forward: computes the loss. merged: gradients of earlier steps exist already.
    """

    def run(scratch: OpScratch) -> int:
        # Do not enter the mode: tensors of earlier stages and of the code between modules belong to other modes.
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes: dict[int, Tensor] = {}
        mine = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]  # not of other ranks' stages
        with without_data(model, mode, device, fakes), Tracker(scratch) as tracker:
            held = [fakes[id(t)] for t in mine]
            for t in (*held, *tensors_of([(b.inputs, b.target) for b in batches])):
                tracker.see(t)
            if merged:
                for t in held:
                    t.grad = torch.zeros_like(t) if t.requires_grad else None
            arriving = {
                (stage, number): (_likes(trace, stage - 1, mode, device), _likes(trace, stage, mode, device))
                for stage in {stage for _, stage, _ in order}
                for number in range(len(batches))
            }
            kept: dict[tuple[int, int], Any] = {}
            for kind, stage, number in order:
                inputs, grads = arriving[stage, number]
                if kind == "F":
                    running = _WithoutData(params, trace, stage, inputs)
                    kept[stage, number] = running.run(partial(forward, batches[number]), seed=0)
                elif kind in "BI":  # W of a split backward only frees what I has left
                    _backward(kept.pop((stage, number)), grads)
            return tracker.peak

    with preserve_rng(), torch.enable_grad():
        return with_scratch(device, run)


def _backward(out: Any, grads: list[Tensor]) -> None:
    if isinstance(out, Tensor):
        out.backward()
        return
    pairs = [(t, grad) for t, grad in zip(out, grads, strict=True) if t.requires_grad]
    torch.autograd.backward([t for t, _ in pairs], [grad for _, grad in pairs])


def _likes(trace: Trace, boundary: int, mode: FakeTensorMode, device: torch.device) -> list[Tensor]:
    """Fake tensors like those that cross a boundary, or like their gradients."""
    if not 0 <= boundary < len(trace.boundaries):
        return []
    crossing: Boundary = trace.boundaries[boundary]
    with mode:
        made = [torch.empty(like.shape, dtype=like.dtype, device=device) for like in crossing.likes]
    return [t.requires_grad_(like.requires_grad) for t, like in zip(made, crossing.likes, strict=True)]


def running_alone(model: nn.Module, batch: StepInput) -> int:
    """The same on a rank that has all stages. batch: the first micro-batch."""
    args, kwargs = batch.arguments
    step = TrainingStep(model, SGD(model.parameters(), lr=0.0), args, kwargs, batch.loss_fn, batch.target)
    return estimate(replace(step, kept_gradients=True)).running
