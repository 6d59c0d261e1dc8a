"""X.MultiGPUTrainer, with a model that was minimized and with one that was distributed."""

from __future__ import annotations

import re
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from small_applications import batch, make
from static_models import losses, minimized, started

from fleetx import UsageError, fleet
from fleetx.paddle.api import fluid
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


def test_a_benchmark_counts_the_samples_of_arrays_too(monkeypatch):
    clock = count()
    each_step_takes_a_second = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("fleetx.paddle.trainer.time", each_step_takes_a_second)
    arrays = [{name: tensor.numpy() for name, tensor in batch("resnet", rows=6).items()}]
    assert MultiGPUTrainer().quick_benchmark(minimized(), arrays, start_step=0, end_step=3) == 6


def test_val_of_two_ranks_counts_the_samples_of_both(ranks):
    alone = MultiGPUTrainer().val(minimized(), batches(2), ["acc1", "loss"])
    for found in ranks.run(validated):
        assert found == pytest.approx(alone)


def validated():
    model = minimized()
    return MultiGPUTrainer().val(model, [batches(2)[fleet.worker_index()]], ["acc1", "loss"])


BENCHMARKS = {
    "quick": lambda trainer: trainer.quick_benchmark(minimized(), batches(2), start_step=1, end_step=4),
    "long": lambda trainer: trainer.benchmark(eager(), batches(2), start_step=1),
    "val": lambda trainer: trainer.benchmark_val(minimized(), batches(2), start_step=1, end_step=4),
}


@pytest.mark.parametrize("which", BENCHMARKS)
def test_a_benchmark_goes_round_the_loader_and_tells_samples_per_second(which, capsys, monkeypatch):
    monkeypatch.setattr("fleetx.paddle.trainer.BENCHMARK_STEPS", 3)
    found = BENCHMARKS[which](MultiGPUTrainer())
    assert found > 0
    assert capsys.readouterr().out == f"steps 1 to 3: {found:f} samples per second\n"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t, m: t.fit(m, batches(), 1, use_dali=True), "remove it"),
        (lambda t, m: t.fit("model", batches(), 1), "takes a model, not str"),
        (lambda t, m: t.val(m, batches(), ["acc9"]), "does not return 'acc9': it returns loss, acc1, acc5"),
        (lambda t, m: t.val(m, [], ["acc1"]), "the loader gives no batch"),
        (lambda t, m: t.quick_benchmark(m, [], 0, 3), "the loader gives no batch"),
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
