"""What is to be trained: a model, an optimizer, and a batch to measure with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.trees import LossFn, arguments, map_tensors, samples_in, tensors_of
from fleetx.comm.world import World
from fleetx.errors import UsageError
from fleetx.measure.child import forked
from fleetx.measure.fake_step import TrainingStep
from fleetx.measure.largest_batch import copies
from fleetx.strategy.part import Part
from fleetx.strategy.stage import Stage


@dataclass(frozen=True)
class Job:
    model: nn.Module
    optimizer: Optimizer
    inputs: Any
    targets: Any
    loss_fn: LossFn | None
    samples: int

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer, sample: Any, loss_fn: Callable[..., Tensor] | None) -> Job:
        """With `loss_fn` the sample is (inputs, targets). Raises UsageError for what is none."""
        sample = dict(sample) if isinstance(sample, Mapping) else sample
        if loss_fn is not None and not (isinstance(sample, tuple | list) and len(sample) == 2):
            raise UsageError("with loss_fn the sample must be a pair: sample=(inputs, targets)")
        inputs, targets = sample if loss_fn is not None else (sample, None)
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        samples = samples_in((inputs, targets))
        if not samples:
            raise UsageError("the sample must have at least one tensor with at least one sample in it")
        return Job(model, optimizer, inputs, targets, loss_fn, samples)

    @property
    def loss(self) -> Callable[[Any, Any], Tensor] | None:
        """Of outputs and targets, where there may be none."""
        function = self.loss_fn
        if function is None or self.targets is not None:
            return function
        return lambda out, _: function(out)

    def shared(self, world: World) -> Job:
        """All ranks measure with the batch of rank 0: theirs may differ, and the ranks of a pipeline need the same."""
        shapes = [[list(t.shape), str(t.dtype)] for t in tensors_of((self.inputs, self.targets))]
        others = world.gather_json(shapes)
        if different := next((rank for rank, theirs in enumerate(others) if theirs != others[0]), None):
            raise UsageError(
                f"the samples of rank 0 and rank {different} have different shapes: give every rank one of the same"
            )
        copies: list[Tensor] = []

        def copied(t: Tensor) -> Tensor:
            copies.append(t.detach().reshape(-1).clone().view(torch.uint8))  # bytes: gloo does not know every dtype
            return copies[-1].view(t.dtype).view(t.shape)

        inputs, targets = map_tensors(copied, (self.inputs, self.targets))
        world.broadcast([copy for copy in copies if copy.numel()])
        return replace(self, inputs=inputs, targets=targets)

    def copied(self) -> Job:
        """Where a trial runs in this process: the model and the optimizer of the user stay as they are."""
        model, optimizer = copies(self.model, self.optimizer)
        return replace(self, model=model, optimizer=optimizer)

    def batch(self, n: int) -> tuple[Any, Any]:
        """Inputs and targets of n samples: those of the sample, over and over."""

        def cut(t: Tensor) -> Tensor:
            same = t.dim() and len(t) == self.samples
            return t[torch.arange(n, device=t.device) % self.samples] if same and n != self.samples else t

        made: tuple[Any, Any] = map_tensors(cut, (self.inputs, self.targets))
        return made

    def step(self, n: int, parts: Sequence[Part], *, kept: bool, beside: int = 0) -> TrainingStep:
        args, kwargs = arguments(self.inputs)
        return TrainingStep(
            self.model, self.optimizer, args, kwargs, self.loss, self.targets, batch=n, samples=self.samples,
            parts=[part for part in parts if part.changes_forward], kept_gradients=kept, extra_bytes=beside,
        )  # fmt: skip


def name(parts: Sequence[Part]) -> str:
    """Parts that change how a forward runs, in one word for all of them."""
    return "; ".join(sorted(repr(part) for part in parts if part.changes_forward))


def alone(parts: Sequence[Part]) -> list[Part]:
    """Those with which one rank runs a whole step by itself, at the same speed."""
    distributed = {Stage.REDUCE, Stage.GATE, Stage.SCHEDULE}
    return [
        part for part in parts
        if not part.divides and not distributed & {act.stage for act in part.acts()} and not by_budget(part)
    ]  # fmt: skip


def by_budget(part: Part) -> bool:
    return part.segments and getattr(part, "memory_budget", None) is not None


def apart(make: Callable[[], Any], device: torch.device) -> Any:
    """In a child: it may run the user's code on tensors without data, and nothing of that may be left here."""
    if device.type == "cuda":
        return make()
    answer = forked(make, seconds=600)
    if answer.error:
        raise UsageError(f"the bytes of this model cannot be counted: {answer.error}")
    return answer.value


def from_first(world: World, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, as plain data, on all ranks; its error too."""
    made: dict[str, Any] = {}
    error: Exception | None = None
    if world.rank == 0:
        try:
            made = {"value": make()}
        except Exception as found:
            made, error = {"error": str(found)}, found
    told = world.broadcast_json(made)
    if error is not None:
        raise error
    if "error" in told:
        raise UsageError(f"rank 0: {told['error']}")
    return told["value"]


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
