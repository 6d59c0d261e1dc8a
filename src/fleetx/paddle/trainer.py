"""The old system's `X.MultiGPUTrainer`: the loop around a model, with its lines of progress.

    trainer = X.MultiGPUTrainer()
    trainer.fit(model, loader, epoch=1)
    trainer.val(model, val_loader, ["acc1", "acc5"], 0)

The model is one that `minimize(model.loss)` was called for, or one that fleet.distribute returned; it returns its loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.base.trees import arguments, loss_of, map_tensors, samples_in
from fleetx.comm.session import current
from fleetx.engine.scheduled import ScheduledEngine
from fleetx.errors import UsageError
from fleetx.paddle.static import feeds
from fleetx.paddle.static import training as static

LINE = "epoch id: %d, step%d, train_loss: %f, total time cost = %f, step per second: %f, speed: %f"
MEASURED = 100  # steps of `benchmark`


class MultiGPUTrainer:
    """Of as many workers as were started, on GPUs or not."""

    def fit(self, model: nn.Module, dataloader: Any, epoch: int, use_dali: bool = False, start_step: int = 10) -> None:
        """Train for so many epochs. From `start_step` on each step is timed and printed; speed is 1 / its seconds."""
        _check_call(model, use_dali)
        for number in range(epoch):
            total = 0.0
            for i, batch in enumerate(_batches(dataloader)):
                loss, _, seconds = _timed(_step, model, batch)
                if i >= start_step:
                    total += seconds
                    print(LINE % (number, i, loss, total, (i - start_step + 1) / total, 1 / seconds), flush=True)

    def val(
        self, model: nn.Module, dataloader: Any, target_list: Sequence[Any], current_epoch: int = -1
    ) -> dict[str, float]:
        """The mean of each target over all samples of all workers, printed and returned."""
        _check_call(model)
        names = [target if isinstance(target, str) else target.name for target in target_list]
        world = current().here()
        sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=world.device)
        for batch in _batches(dataloader):
            fed = _fed(model, batch)
            outputs, samples = _outputs(model, fed), samples_in(fed)
            sums += torch.tensor([*(_named(outputs, name) * samples for name in names), samples], device=world.device)
        world.sum(sums)
        *means, samples = sums.tolist()
        if not samples:
            raise UsageError("there is no sample to evaluate: the loader gives no batch of tensors")
        found = {name: mean / samples for name, mean in zip(names, means, strict=True)}
        said = ", ".join(f"{name}: {value:f}" for name, value in found.items())
        print(f"epoch id: {current_epoch}, {said}" if current_epoch >= 0 else said, flush=True)
        return found

    def quick_benchmark(self, model: nn.Module, dataloader: Any, start_step: int = 20, end_step: int = 200) -> float:
        """The mean number of samples that this worker trains in a second, from start_step to before end_step."""
        _check_call(model)
        return _measured(_step, model, dataloader, start_step, end_step)

    def benchmark(self, model: nn.Module, dataloader: Any, start_step: int = 20) -> float:
        """The same over 100 steps."""
        return self.quick_benchmark(model, dataloader, start_step, start_step + MEASURED)

    def benchmark_val(self, model: nn.Module, dataloader: Any, start_step: int = 20, end_step: int = 200) -> float:
        """The mean number of samples that this worker evaluates in a second."""
        _check_call(model)
        return _measured(_evaluated, model, dataloader, start_step, end_step)


def _check_call(model: Any, use_dali: bool = False) -> None:
    if use_dali:
        raise UsageError("use_dali=True: batches come from torch's DataLoader: leave it out")
    if not isinstance(model, nn.Module):
        raise UsageError(f"the trainer takes a model, not {type(model).__name__}")
    if static.is_described(model):
        static.start_once(model)


def _batches(loader: Any, number: int | None = None) -> Iterator[Any]:
    """Of one epoch; or so many, from as many epochs as that takes."""
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
            raise UsageError("the loader gives no batch")


def _measured(act: Callable[[nn.Module, Any], float], model: nn.Module, loader: Any, start: int, end: int) -> float:
    if not 0 <= start < end:
        raise UsageError(f"start_step = {start} must come before end_step = {end}")
    samples, total = 0, 0.0
    for i, batch in enumerate(_batches(loader, end)):
        _, number, seconds = _timed(act, model, batch)
        if i >= start:
            samples, total = samples + number, total + seconds
    print(f"steps {start} to {end - 1}: {samples / total:f} samples per second", flush=True)
    return samples / total


def _timed(act: Callable[[nn.Module, Any], float], model: nn.Module, batch: Any) -> tuple[float, int, float]:
    """The loss, the number of samples, seconds."""
    begun = time.perf_counter()
    fed = _fed(model, batch)
    return act(model, fed), samples_in(fed), time.perf_counter() - begun


# --- one batch ------------------------------------------------------------------------------------
def _fed(model: nn.Module, batch: Any) -> Any:
    """The batch as the model takes it, on its device."""
    if static.is_described(model):
        return feeds.tensors(model, batch)
    return map_tensors(lambda t: t.to(fleet.device()), batch)


def _step(model: nn.Module, fed: Any) -> float:
    if static.is_described(model):
        return static.step(model, fed)[model.loss.name].item()
    if not model.training:
        model.train()
    optimizer = current().find(model).optimizer
    loss = fleet.forward_backward(fed, model=model)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _outputs(model: nn.Module, fed: Any) -> Any:
    """What the model returns in evaluation; of a pipeline that is the loss."""
    if static.is_described(model):
        return static.evaluate(model, fed)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            if isinstance(current().find(model), ScheduledEngine):
                return fleet.forward_backward(fed, model=model)
            args, kwargs = arguments(fed)
            return model(*args, **kwargs)
    finally:
        model.train(training)


def _evaluated(model: nn.Module, fed: Any) -> float:
    loss = loss_of(_outputs(model, fed))
    return 0.0 if loss is None else loss.item()


def _named(outputs: Any, name: str) -> float:
    if isinstance(outputs, Tensor):
        found = outputs if name == "loss" else None
    else:
        found = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    if not isinstance(found, Tensor):
        known = getattr(outputs, "_fields", None) or (list(outputs) if isinstance(outputs, Mapping) else ["loss"])
        raise UsageError(f"the model returns no {name!r}: it has {', '.join(map(str, known))}")
    return found.item()
