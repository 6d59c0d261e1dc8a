"""Trackers get the same facts as the file: numbers of each round, values of the script, and the strategy."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetx.base.suggest import did_you_mean
from fleetx.errors import UsageError
from fleetx.record.schema import number

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_LEFT_OUT = ("t", "rank", "model", "round", "kind", "updated", "time")


def check(names: list[str]) -> None:
    """Raise if a tracker is not known or not installed, on every rank, before anything is written."""
    for name in names:
        if name not in _PACKAGES:
            hint = did_you_mean(name, list(_PACKAGES)) or f"use {', '.join(_PACKAGES)}"
            raise UsageError(f"trackers: {name!r} is not known: {hint}")
        try:
            importlib.import_module(_PACKAGES[name])
        except ImportError:
            raise UsageError(f"trackers: {name} is not installed: pip install 'fleetx[{name}]'") from None


def made(names: list[str], folder: Path) -> list[Any]:
    kinds = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}
    return [kinds[name](folder) for name in names]


def numbers_of(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line that a tracker plots."""
    values: dict[str, Any] = {}
    if line["kind"] == "round":
        values = {key: value for key, value in line.items() if key not in _LEFT_OUT}
        values |= {f"time/{kind}": seconds for kind, seconds in line["time"].items()}
    elif line["kind"] == "value":
        values = line["values"]
    elif line["kind"] == "rank":
        values = {f"rank{line['rank']}/{key}": line[key] for key in ("sent", "peak") if key in line}
    for key, value in values.items():
        if (found := number(value)) is not None:
            yield key, found


class _Output:
    """Called with every line, in the thread that writes them."""

    _round = 0  # the last one of the first model

    def __call__(self, line: dict[str, Any]) -> None:
        if line["kind"] == "round" and line["model"] == 0:
            self._round = line["round"]
        if line["kind"] == "plan":
            self.describe({"strategy": line["strategy"], "explain": line["explain"], "parameters": line["parameters"]})
        if found := dict(numbers_of(line)):
            self.plot(found, self._round)

    def plot(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def describe(self, facts: dict[str, Any]) -> None:
        raise NotImplementedError


class TensorBoard(_Output):
    """Event files in the folder of the record."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def plot(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def describe(self, facts: dict[str, Any]) -> None:
        indented = "\n".join(f"    {line}" for line in facts["explain"].splitlines())
        self._writer.add_text("plan", indented, self._round)

    def close(self) -> None:
        self._writer.close()


class Wandb(_Output):
    """A run named after the folder; W&B's own environment variables set project and account."""

    def __init__(self, folder: Path):
        import wandb

        self._run = wandb.init(name=folder.resolve().name, dir=str(folder))

    def plot(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def describe(self, facts: dict[str, Any]) -> None:
        self._run.config.update(facts, allow_val_change=True)

    def close(self) -> None:
        self._run.finish()


class Mlflow(_Output):
    """A run named after the folder, at MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path):
        import mlflow

        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        experiment = self._client.get_experiment_by_name("fleetx")
        number_of = experiment.experiment_id if experiment is not None else self._client.create_experiment("fleetx")
        self._run = self._client.create_run(number_of, run_name=folder.resolve().name).info.run_id

    def plot(self, values: dict[str, float], step: int) -> None:
        now = round(1000 * time.time())
        found = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, found)  # one request for all: the server may be far away

    def describe(self, facts: dict[str, Any]) -> None:
        self._client.log_dict(self._run, facts["strategy"], "strategy.yaml")
        self._client.log_text(self._run, facts["explain"], "explain.txt")

    def close(self) -> None:
        self._client.set_terminated(self._run)
