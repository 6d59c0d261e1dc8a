"""What is to be trained: a model, an optimizer, and a batch to measure with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.trees import LossFn, arguments, map_tensors, samples_in, tensors_of
from fleetx.comm.world import World
from fleetx.errors import UsageError
from fleetx.measure.fake_step import TrainingStep
from fleetx.measure.largest_batch import copies
from fleetx.strategy.part import Part


@dataclass(frozen=True)
class Workload:
    model: nn.Module
    optimizer: Optimizer
    inputs: Any
    targets: Any
    loss_fn: LossFn | None
    samples: int

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer, sample: Any, loss_fn: Callable[..., Tensor] | None) -> Workload:
        """With `loss_fn`, the sample is (inputs, targets). Raises UsageError if the sample cannot be used."""
        sample = dict(sample) if isinstance(sample, Mapping) else sample
        if loss_fn is not None and not (isinstance(sample, tuple | list) and len(sample) == 2):
            raise UsageError("with loss_fn, the sample must be a pair: sample=(inputs, targets)")
        inputs, targets = sample if loss_fn is not None else (sample, None)
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        samples = samples_in((inputs, targets))
        if not samples:
            raise UsageError("the sample has no tensor, or its first tensor is empty: pass a batch of at least one")
        return Workload(model, optimizer, inputs, targets, loss_fn, samples)

    @property
    def loss(self) -> Callable[[Any, Any], Tensor] | None:
        """The loss as a function of outputs and targets, even if there are no targets."""
        function = self.loss_fn
        if function is None or self.targets is not None:
            return function
        return lambda out, _: function(out)

    def with_sample_of_rank_0(self, world: World) -> Workload:
        """Ranks may bring different batches, but the ranks of a pipeline need the same one."""
        shapes = world.gather_json([[list(t.shape), str(t.dtype)] for t in tensors_of((self.inputs, self.targets))])
        if different := next((rank for rank, theirs in enumerate(shapes) if theirs != shapes[0]), None):
            raise UsageError(
                f"the samples of rank 0 and rank {different} have different shapes or types: pass samples of one shape"
            )
        copies: list[Tensor] = []

        def copy(t: Tensor) -> Tensor:
            copies.append(t.detach().reshape(-1).clone().view(torch.uint8))  # gloo does not support every dtype
            return copies[-1].view(t.dtype).view(t.shape)

        inputs, targets = map_tensors(copy, (self.inputs, self.targets))
        world.broadcast([t for t in copies if t.numel()])
        return replace(self, inputs=inputs, targets=targets)

    def copied(self) -> Workload:
        """For trials in this process, which must not change the user's model and optimizer."""
        model, optimizer = copies(self.model, self.optimizer)
        return replace(self, model=model, optimizer=optimizer)

    def batch(self, n: int) -> tuple[Any, Any]:
        """Inputs and targets of n samples: those of the sample, repeated or truncated."""

        def resize(t: Tensor) -> Tensor:
            if n == self.samples or not t.dim() or len(t) != self.samples:
                return t
            return t[torch.arange(n, device=t.device) % self.samples]

        made: tuple[Any, Any] = map_tensors(resize, (self.inputs, self.targets))
        return made

    def step(self, n: int, parts: Sequence[Part], *, kept_gradients: bool = True, kept_bytes: int = 0) -> TrainingStep:
        args, kwargs = arguments(self.inputs)
        return TrainingStep(
            self.model, self.optimizer, args, kwargs, self.loss, self.targets, batch=n, samples=self.samples,
            parts=[part for part in parts if part.changes_forward], kept_gradients=kept_gradients,
            extra_bytes=kept_bytes,
        )  # fmt: skip
