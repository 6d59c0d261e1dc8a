"""TensorBoard, W&B and MLflow get the same facts as the file; each is skipped where it is not installed."""

from __future__ import annotations

import json

import pytest

from fleetx import fleet
from fleetx.errors import UsageError
from fleetx.record import trackers
from fleetx.record.read import read
from fleetx.record.trackers import numbers_of
from training import batches, net, sgd, zero_last


def train(folder, tracker):
    fleet.init()
    recorder = fleet.record(folder, trackers=tracker, predict_memory=False)
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(clip={"clip_norm": 1.0}))
    for x, y in batches(3):
        zero_last(model, optimizer, x, y)
    fleet.log(accuracy=0.5)
    recorder.close()
    return read(folder)


def test_an_unknown_tracker_and_one_that_is_not_installed_are_errors(tmp_path, monkeypatch):
    fleet.init()
    with pytest.raises(UsageError, match="did you mean 'tensorboard'"):
        fleet.record(tmp_path, trackers="tensorbord")
    monkeypatch.setitem(trackers._PACKAGES, "wandb", "no_such_package")
    with pytest.raises(UsageError, match=r"wandb is not installed: pip install 'fleetx\[wandb\]'"):
        fleet.record(tmp_path, trackers=["wandb"])
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_fails_does_not_end_the_training(tmp_path, monkeypatch, caplog):
    class Failing:
        def __init__(self, folder):
            pass

        def __call__(self, line):
            raise OSError("no space left")

    monkeypatch.setattr(trackers, "check", lambda names: None)
    monkeypatch.setattr(trackers, "made", lambda names, folder: [Failing(folder)])
    caplog.set_level("WARNING")  # fleetrun, in a test before this one, may have disabled logging
    found = train(tmp_path, "tensorboard")
    assert len(found.rounds) == 3
    assert "no space left" in caplog.text


def test_what_is_plotted_are_the_numbers_of_the_lines():
    line = {"kind": "round", "t": 1.0, "rank": 0, "model": 0, "round": 2, "updated": True, "loss": "nan", "rate": 0.1,
            "samples": 4, "time": {"data": 0.5}}  # fmt: skip
    found = dict(numbers_of(line))
    assert found["rate"] == 0.1
    assert found["time/data"] == 0.5
    assert found["loss"] != found["loss"]
    assert not {"t", "round", "updated", "kind"} & found.keys()


def test_tensorboard_files_have_the_curves(tmp_path):
    pytest.importorskip("tensorboard")
    found = train(tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("loss")}
    assert shown == pytest.approx({r["round"]: r["loss"] for r in found.rounds}, rel=1e-6)
    assert [e.value for e in events.Scalars("accuracy")] == [0.5]


def test_wandb_gets_the_curves(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    found = train(tmp_path, "wandb")
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    kept = path.read_bytes()  # its numbers are in it as text
    assert b"accuracy" in kept
    assert all(json.dumps(r["loss"]).encode() in kept for r in found.rounds)


@pytest.mark.filterwarnings("ignore")  # of MLflow itself
def test_mlflow_gets_the_curves(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    found = train(tmp_path / "run", ["mlflow"])
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("fleetx").experiment_id])
    shown = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "loss")}
    assert shown == pytest.approx({r["round"]: r["loss"] for r in found.rounds})
    assert {a.path for a in client.list_artifacts(run.info.run_id)} == {"strategy.yaml", "explain.txt"}
