"""X.MultiGPUTrainer, with a model that was minimized and with one that was distributed."""

from __future__ import annotations

import re
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from small_applications import batch, make
from static_models import losses, minimized, started

import fleetx
from fleetx import UsageError, fleet
from fleetx.comm import notices
from fleetx.paddle.api import fluid
from fleetx.paddle.static import training
from fleetx.paddle.trainer import MultiGPUTrainer

LINE = re.compile(
    r"epoch id: (\d+), step(\d+), train_loss: ([\d.]+), total time cost = [\d.]+, step per second: [\d.]+, "
    r"speed: [\d.]+"
)


def batches(number=4, name="resnet"):
    return [batch(name, seed=step) for step in range(number)]


def eager(name="resnet"):
    fleet.init()
    model = make(name)
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))[0]


def printed(model, loader, capsys, **settings):
    MultiGPUTrainer().fit(model, loader, **settings)
    lines = capsys.readouterr().out.splitlines()
    return [LINE.fullmatch(line).groups() for line in lines]


def test_fit_prints_the_steps_behind_the_first_ones_of_each_epoch(capsys):
    expected = losses(*started(), "resnet", steps=4)
    for model in (minimized(), eager()):
        found = printed(model, batches(), capsys, epoch=2, start_step=1)
        assert [(int(epoch), int(step)) for epoch, step, _ in found] == [(e, s) for e in (0, 1) for s in (1, 2, 3)]
        assert [loss for *_, loss in found[:3]] == [f"{loss:f}" for loss in expected[1:]]


def test_a_loader_that_is_called_gives_its_batches_too(capsys):
    assert len(printed(minimized(), lambda: iter(batches(2)), capsys, epoch=1, start_step=0)) == 2


def test_val_is_the_mean_over_all_samples_and_trains_nothing(capsys):
    loader = [batch("resnet", seed=0, rows=6), batch("resnet", seed=1, rows=2)]
    for model in (minimized(), eager()):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        found = MultiGPUTrainer().val(model, loader, ["acc1", model.loss], 3)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        twin = make("resnet").eval()
        outs = [twin(**one) for one in loader]
        for name in ("acc1", "loss"):
            mean = (6 * getattr(outs[0], name) + 2 * getattr(outs[1], name)) / 8
            assert found[name] == pytest.approx(mean.item())
        assert capsys.readouterr().out == f"epoch id: 3, acc1: {found['acc1']:f}, loss: {found['loss']:f}\n"
        assert model.training


def test_arrays_count_as_many_samples_as_tensors():
    loader = [batch("resnet", seed=0, rows=6), batch("resnet", seed=1, rows=2)]
    arrays = [{name: tensor.numpy() for name, tensor in one.items()} for one in loader]
    expected = MultiGPUTrainer().val(minimized(), loader, ["acc1", "loss"])
    assert MultiGPUTrainer().val(minimized(), arrays, ["acc1", "loss"]) == expected


@pytest.fixture
def seconds(monkeypatch):
    """A clock by which a step takes a quarter of a second."""
    clock = count(step=0.25)
    monkeypatch.setattr("fleetx.paddle.trainer.time", SimpleNamespace(perf_counter=lambda: next(clock)))


def test_a_quick_benchmark_goes_round_the_loader_and_tells_steps_per_second(seconds, capsys):
    model = minimized()
    assert MultiGPUTrainer().quick_benchmark(model, batches(2), start_step=1, end_step=4) == 4
    assert capsys.readouterr().out == "steps 1 to 3: 4.000000 steps per second\n"
    assert training.run_count(model) == 4


@pytest.mark.parametrize("model", [minimized, eager], ids=["minimized", "eager"])
def test_the_third_argument_of_benchmark_is_the_number_of_epochs(seconds, capsys, model):
    made, runs = model(), []
    loader = Counted(batches(3), runs)
    assert MultiGPUTrainer().benchmark(made, loader, 2, False, 1) == 4
    assert capsys.readouterr().out == "steps 1 to 2: 4.000000 steps per second\n"
    assert len(runs) == 2


class Counted(list):
    def __init__(self, items, runs):
        super().__init__(items)
        self.runs = runs

    def __iter__(self):
        self.runs.append(1)
        return super().__iter__()


def test_benchmark_val_returns_the_targets_of_each_batch():
    model, loader = minimized(), batches(2)
    found = MultiGPUTrainer().benchmark_val(model, loader, ["acc1", model.loss], use_dali=True)
    outs = [make("resnet").eval()(**one) for one in loader]
    assert found == {name: pytest.approx([getattr(out, name).item() for out in outs]) for name in ("acc1", "loss")}


def test_dali_is_left_out_with_one_notice(capsys, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    model, trainer = minimized(), MultiGPUTrainer()
    trainer.fit(model, batches(1), 1, use_dali=True)
    trainer.val(model, batches(1), ["acc1"], 0, True)
    assert capsys.readouterr().err.count("use_dali=True has no effect") == 1


def test_a_trainer_takes_a_place_and_has_an_older_name():
    assert fleetx.Trainer is fleetx.MultiGPUTrainer
    fleetx.Trainer(fluid.CUDAPlace(0)).fit(minimized(), batches(1), 1)
    with pytest.raises(UsageError, match="takes a place"):
        MultiGPUTrainer("gpu:0")


def test_val_of_two_ranks_counts_the_samples_of_both(ranks):
    alone = MultiGPUTrainer().val(minimized(), batches(2), ["acc1", "loss"])
    for found in ranks.run(validated):
        assert found == pytest.approx(alone)


def validated():
    model = minimized()
    return MultiGPUTrainer().val(model, [batches(2)[fleet.worker_index()]], ["acc1", "loss"])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t, m: t.benchmark(m, batches(2), 1), "an epoch has 2 steps: start_step = 20 must be below that"),
        (lambda t, m: t.benchmark(m, batches(2), 0), "epoch = 0, start_step = 20: must be at least 1 and 0"),
        (lambda t, m: t.fit("model", batches(), 1), "takes a model, not str"),
        (lambda t, m: t.val(m, batches(), ["acc9"]), "does not return 'acc9': it returns loss, acc1, acc5"),
        (lambda t, m: t.val(m, [], ["acc1"]), "the loader yields no batch"),
        (lambda t, m: t.quick_benchmark(m, [], 0, 3), "the loader yields no batch"),
        (
            lambda t, m: t.quick_benchmark(m, batches(), 3, 3),
            "start_step = 3: must be at least 0 and below end_step = 3",
        ),
        (lambda t, m: t.fit(make("vgg"), batches(1, "vgg"), 1), "has not been passed to fleet.distribute"),
    ],
)
def test_what_makes_no_sense_is_refused(call, says):
    with pytest.raises(UsageError, match=says):
        call(MultiGPUTrainer(), minimized(described=fluid.optimizer.SGD(0.1)))
