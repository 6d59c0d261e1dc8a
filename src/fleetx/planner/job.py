"""What is to be trained: a model, an optimizer, and a batch to measure with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.errors import UsageError
from fleetx.memory.trace import Step
from fleetx.part import Part
from fleetx.stage import Stage
from fleetx.structure import LossFn, arguments, map_tensors, tensors_of
from fleetx.world import World


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
        """With `loss_fn` the sample is (inputs, targets)."""
        if loss_fn is not None and not (isinstance(sample, tuple | list) and len(sample) == 2):
            raise UsageError("with loss_fn the sample must be a pair: sample=(inputs, targets)")
        inputs, targets = sample if loss_fn is not None else (sample, None)
        samples = next((len(t) for t in tensors_of(inputs) if t.dim()), 0)
        if not samples:
            raise UsageError("the sample must have at least one tensor with at least one sample in it")
        return Job(model, optimizer, inputs, targets, loss_fn, samples)

    def batch(self, n: int) -> tuple[Any, Any]:
        """Inputs and targets of n samples: those of the sample, over and over."""

        def cut(t: Tensor) -> Tensor:
            same = t.dim() and len(t) == self.samples
            return t[torch.arange(n, device=t.device) % self.samples] if same and n != self.samples else t

        made: tuple[Any, Any] = map_tensors(cut, (self.inputs, self.targets))
        return made

    def step(self, n: int, parts: Sequence[Part], *, kept: bool, beside: int = 0) -> Step:
        args, kwargs = arguments(self.inputs)
        return Step(
            self.model, self.optimizer, args, kwargs, self.loss_fn, self.targets, batch=n, samples=self.samples,
            parts=[part for part in parts if part.local], kept_gradients=kept, beside=beside,
        )  # fmt: skip


def name(parts: Sequence[Part]) -> str:
    """Parts that change how a forward runs, in one word for all of them."""
    return "; ".join(sorted(repr(part) for part in parts if part.local))


def alone(parts: Sequence[Part]) -> list[Part]:
    """Those with which one rank runs a whole step by itself, at the same speed."""
    distributed = {Stage.REDUCE, Stage.GATE, Stage.SCHEDULE}
    return [
        part for part in parts
        if not part.divides and not distributed & {act.stage for act in part.acts()} and not by_budget(part)
    ]  # fmt: skip


def by_budget(part: Part) -> bool:
    return part.segments and getattr(part, "memory_budget", None) is not None


def everyone(world: World, data: Any) -> list[Any]:
    """Plain data of all ranks, on all ranks."""
    text = json.dumps(data).encode()
    longest = torch.tensor([len(text)], device=world.device)
    world.maximum(longest)
    buffer = torch.zeros(int(longest.item()), dtype=torch.uint8)
    buffer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = world.gather(buffer.to(world.device)).cpu()
    return [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in rows]


def from_first(world: World, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, as plain data, on all ranks; its error too."""
    made: dict[str, Any] = {}
    error: Exception | None = None
    if world.rank == 0:
        try:
            made = {"value": make()}
        except Exception as found:
            made, error = {"error": str(found)}, found
    told = json.loads(world.said_by_first(json.dumps(made).encode()))
    if error is not None:
        raise error
    if "error" in told:
        raise UsageError(f"rank 0: {told['error']}")
    return told["value"]


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
