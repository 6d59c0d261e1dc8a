"""`X.MultiGPUTrainer`: a training loop that prints its progress.

    trainer = X.MultiGPUTrainer()
    trainer.fit(model, loader, epoch=1)
    trainer.val(model, val_loader, ["acc1", "acc5"], 0)

The model must be one that `minimize(model.loss)` was called for or that fleet.distribute returned, and return its loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.base.trees import map_tensors, samples_in
from fleetx.comm.notices import say_once
from fleetx.comm.session import current
from fleetx.engine.scheduled import ScheduledEngine
from fleetx.errors import UsageError
from fleetx.paddle.static import devices, feeds
from fleetx.paddle.static import training as static
from fleetx.paddle.static.executor import Executor

LINE = "epoch id: %d, step%d, train_loss: %f, total time cost = %f, step per second: %f, speed: %f"
BENCHMARK_STEPS = 100
Out = TypeVar("Out")
NO_DALI = "use_dali=True has no effect: torch's DataLoader reads the images; speed it up with num_workers"


class MultiGPUTrainer:
    """Trains on all workers, with or without GPUs."""

    def __init__(self, place: devices.Place | None = None):
        """place: as in the first versions of FleetX. It is only checked, like that of an Executor."""
        self._place = Executor(place).place

    def fit(self, model: nn.Module, dataloader: Any, epoch: int, use_dali: bool = False, start_step: int = 10) -> None:
        """Train for `epoch` epochs. Steps from `start_step` on are timed and printed; speed is steps per second."""
        self._check_call(model, use_dali)
        for number in range(epoch):
            total = 0.0
            for i, (loss, seconds) in enumerate(_timed(_step, model, dataloader)):
                if i >= start_step:
                    total += seconds
                    print(LINE % (number, i, loss, total, (i - start_step + 1) / total, 1 / seconds), flush=True)

    def val(
        self,
        model: nn.Module,
        dataloader: Any,
        target_list: Sequence[Any],
        current_epoch: int = -1,
        use_dali: bool = False,
    ) -> dict[str, float]:
        """Print and return the mean of each target over all samples of all workers."""
        self._check_call(model, use_dali)
        names = _names(target_list)
        world = current().here()
        sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=world.device)
        for batch in _batches(dataloader):
            inputs = _inputs(model, batch)
            outputs, samples = _outputs(model, inputs), samples_in(inputs)
            sums += torch.tensor([*(_value(outputs, name) * samples for name in names), samples], device=world.device)
        world.sum(sums)
        *means, samples = sums.tolist()
        if not samples:
            raise UsageError("there is nothing to evaluate: the loader yields no batch of tensors")
        results = {name: mean / samples for name, mean in zip(names, means, strict=True)}
        line = ", ".join(f"{name}: {value:f}" for name, value in results.items())
        print(f"epoch id: {current_epoch}, {line}" if current_epoch >= 0 else line, flush=True)
        return results

    def quick_benchmark(self, model: nn.Module, dataloader: Any, start_step: int = 20, end_step: int = 200) -> float:
        """Return steps per second, from start_step to end_step - 1. A loader with fewer batches is repeated."""
        self._check_call(model)
        if not 0 <= start_step < end_step:
            raise UsageError(f"start_step = {start_step}: must be at least 0 and below end_step = {end_step}")
        seconds = [each for _, each in _timed(_step, model, dataloader, end_step)]
        return _speed(seconds[start_step:], start_step)

    def benchmark(
        self, model: nn.Module, dataloader: Any, epoch: int, use_dali: bool = False, start_step: int = 20
    ) -> float:
        """Train for `epoch` epochs; return the steps per second of the last one, over 100 steps from start_step on."""
        self._check_call(model, use_dali)
        if epoch < 1 or start_step < 0:
            raise UsageError(f"epoch = {epoch}, start_step = {start_step}: must be at least 1 and 0")
        seconds: list[float] = []
        for _ in range(epoch):
            seconds = [each for _, each in _timed(_step, model, dataloader)]
            if len(seconds) <= start_step:
                raise UsageError(f"an epoch has {len(seconds)} steps: start_step = {start_step} must be below that")
        return _speed(seconds[start_step : start_step + BENCHMARK_STEPS], start_step)

    def benchmark_val(
        self, model: nn.Module, dataloader: Any, target_list: Sequence[Any], use_dali: bool = False
    ) -> dict[str, list[float]]:
        """Return each target for each batch of this worker, and print the steps per second."""
        self._check_call(model, use_dali)
        names = _names(target_list)

        def act(model: nn.Module, inputs: Any) -> list[float]:
            outputs = _outputs(model, inputs)
            return [_value(outputs, name) for name in names]

        found = list(_timed(act, model, dataloader))
        if not found:
            raise UsageError("there is nothing to evaluate: the loader yields no batch of tensors")
        _speed([seconds for _, seconds in found], 0)
        return {name: [values[i] for values, _ in found] for i, name in enumerate(names)}

    def _check_call(self, model: Any, use_dali: bool = False) -> None:
        if use_dali:
            say_once(NO_DALI)
        if not isinstance(model, nn.Module):
            raise UsageError(f"the trainer takes a model, not {type(model).__name__}")
        if self._place is not None and current().world is not None:
            self._place.check(fleet.device())
        if static.is_minimized(model) and not static.of(model).started:
            static.start(model)


Trainer = MultiGPUTrainer  # its first name


def _names(target_list: Sequence[Any]) -> list[str]:
    return [target if isinstance(target, str) else target.name for target in target_list]


def _batches(loader: Any, number: int | None = None) -> Iterator[Any]:
    """Iterate over one epoch, or over `number` batches, repeating the loader."""
    count = 0
    while number is None or count < number:
        before = count
        batches: Iterable[Any] = loader() if callable(loader) and not hasattr(loader, "__iter__") else loader
        for batch in batches:
            yield batch
            count += 1
            if count == number:
                return
        if number is None:
            return
        if count == before:
            raise UsageError("the loader yields no batch")


def _speed(seconds: list[float], first: int) -> float:
    """Print and return steps per second."""
    speed = len(seconds) / sum(seconds)
    print(f"steps {first} to {first + len(seconds) - 1}: {speed:f} steps per second", flush=True)
    return speed


def _timed(
    act: Callable[[nn.Module, Any], Out], model: nn.Module, loader: Any, number: int | None = None
) -> Iterator[tuple[Out, float]]:
    """Yield what `act` returns for each batch, and the seconds that it takes."""
    for batch in _batches(loader, number):
        start = time.perf_counter()
        result = act(model, _inputs(model, batch))
        yield result, time.perf_counter() - start


# --- one batch ------------------------------------------------------------------------------------
def _inputs(model: nn.Module, batch: Any) -> Any:
    """Convert the batch for the model, on its device."""
    if static.is_minimized(model):
        return feeds.tensors(model, batch)
    return map_tensors(lambda t: t.to(fleet.device()), batch)


def _step(model: nn.Module, inputs: Any) -> float:
    if static.is_minimized(model):
        return static.step(model, inputs)[model.loss.name].item()
    if not model.training:
        model.train()
    optimizer = current().find(model).optimizer
    loss = fleet.forward_backward(inputs, model=model)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _outputs(model: nn.Module, inputs: Any) -> Any:
    """Evaluate the model; a pipeline returns only its loss."""
    if static.is_minimized(model):
        return static.evaluate(model, inputs)
    return static.forward(model, inputs, pipelined=isinstance(current().find(model), ScheduledEngine))


def _value(outputs: Any, name: str) -> float:
    if isinstance(outputs, Tensor):
        value = outputs if name == "loss" else None
    else:
        value = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    if not isinstance(value, Tensor):
        known = getattr(outputs, "_fields", None) or (list(outputs) if isinstance(outputs, Mapping) else ["loss"])
        raise UsageError(f"the model does not return {name!r}: it returns {', '.join(map(str, known))}")
    return value.item()
