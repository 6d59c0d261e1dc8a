"""The predicted peak in the record of a run, against the real one: what torch's allocator says of a later update, above
what the rank holds between updates."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fleetx import fleet
from fleetx.comm.session import current
from fleetx.fleet import prediction
from fleetx.measure import allocator
from fleetx.planner.trial import _held
from fleetx.record.read import read

WIDTH, SAMPLES, MICRO = 384, 768, 4
BLOCKS = [str(i) for i in range(6)]
SMALL = {"segment_broadcast_MB": 1.3}  # a block is a segment


def tall():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in BLOCKS]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 10))


def both(folder, declared, steps=1):
    """What this rank has predicted (None: it has not), and the real peak."""
    fleet.init()
    recorder = fleet.record(folder, predict_memory=True)
    model = tall()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**declared))
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, WIDTH), torch.randint(0, 10, (SAMPLES,))

    def update():
        for _ in range(steps):
            fleet.forward_backward(x, y, loss_fn=cross_entropy)
            optimizer.step()
            optimizer.zero_grad()

    update()
    update()
    (engine,) = current().entries
    real = _held(engine, (x, y)) + allocator.peak(update, torch.device("cpu"))
    predicted = fleet.metrics().get("predicted")
    recorder.close()
    return predicted, real


@pytest.mark.parametrize(
    ("declared", "steps"),
    [
        ({}, 1),
        ({"gradient_merge": {"k_steps": 2}}, 2),
        ({"recompute": {"checkpoints": BLOCKS}}, 1),
        ({"sharding": {"stage": 2, **SMALL}}, 1),
        ({"sharding": {"stage": 3, **SMALL}}, 1),
        pytest.param(
            {"sharding": {"stage": 3, **SMALL}, "recompute": {"checkpoints": BLOCKS}}, 1, marks=pytest.mark.slow
        ),
        pytest.param({"sharding": {"stage": 3}}, 1, marks=pytest.mark.slow),
        pytest.param({"sharding": {"stage": 3, "gradient_bits": 8, **SMALL}}, 1, marks=pytest.mark.slow),
        pytest.param(
            {"sharding": {"stage": 2, **SMALL}, "gradient_merge": {"k_steps": 2}}, 2, marks=pytest.mark.slow
        ),
    ],
    ids=[
        "plain", "merged", "recompute", "sharding-2", "sharding-3", "sharding-recompute", "sharding-one-segment",
        "sharding-bits", "sharding-merged",
    ],
)  # fmt: skip
def test_the_predicted_peak_is_at_most_3_percent_low_and_20_percent_high(ranks, tmp_path, declared, steps):
    """10 % without recomputation: in a real replay, tensors are freed a little earlier than in the prediction."""
    off = []
    while not any(-0.03 < each < (0.2 if "recompute" in declared else 0.1) for each in off):
        assert len(off) < 2, off  # once in a while, what is received for another bucket is still held at the peak
        (predicted, real), (other, _) = ranks.run(both, str(tmp_path / str(len(off))), declared, steps)
        off.append(predicted / real - 1)
    assert other is None, "rank 0 predicts for all"


@pytest.mark.slow
def test_so_is_that_of_groups_that_shard(four, tmp_path):
    declared = {"sharding": {"stage": 3, "sharding_degree": 2, "hybrid_dp": True, **SMALL}}
    predicted, real = four.run(both, str(tmp_path), declared)[0]
    assert -0.03 < predicted / real - 1 < 0.1


@pytest.mark.parametrize(
    ("mode", "stages"),
    [
        ("1F1B", ["3"]),
        pytest.param("GPipe", ["3"], marks=pytest.mark.slow),
        pytest.param("Interleaved1F1B", ["1", "3", "5"], marks=pytest.mark.slow),
    ],
)
def test_each_rank_of_a_pipeline_predicts_its_own_peak_within_6_percent(ranks, tmp_path, mode, stages):
    declared = {"pipeline": {"stages": stages, "accumulate_steps": MICRO, "schedule_mode": mode}}
    found = ranks.run(both, str(tmp_path), declared)
    # torch keeps buffers for what arrives at the borders of a rank's stages, from before the first update on. Of two
    # stages each rank has one border; of four it has two stages, with three.
    arriving = len(stages) * SAMPLES * WIDTH * 4
    for predicted, real in found:
        assert predicted == pytest.approx(real + arriving, rel=0.06)
    record = read(tmp_path)
    assert record.plans[0]["predicted"] == found[0][0]
    assert record.ranks[1][-1]["predicted"] == found[1][0]


# --- it does no harm --------------------------------------------------------------------------------
CALLS = []


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 2), 0

    def forward(self, x):
        CALLS.append(torch.rand(()))
        self.calls += 1
        return self.layer(x)


class Reads(Counts):
    def forward(self, x):
        return self.layer(x) * (1 if self.layer.weight.sum().item() else 2)


def run(folder, make=Counts, **options):
    CALLS.clear()
    fleet.init()
    recorder = fleet.record(folder, **options)
    torch.manual_seed(0)
    model = make()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()
    fleet.release(model)  # else the next record would have it, too
    return [model.calls, [float(drawn) for drawn in CALLS], torch.rand(3).tolist(), model.layer.weight.tolist()], read(
        folder
    )


def test_a_run_is_the_same_with_and_without_a_prediction(tmp_path):
    with_it, record = run(tmp_path / "with")
    without, other = run(tmp_path / "without", predict_memory=False)
    assert with_it == without
    assert record.plans[0]["predicted"] > 0
    assert "turned it off" in other.plans[0]["unpredicted"]
    assert len(record.plans) == len(other.plans) == 1, "the copy that was predicted is no model of the run"


def test_what_cannot_be_predicted_says_why_and_the_run_goes_on(tmp_path):
    _, record = run(tmp_path, make=Reads)
    assert "predicted" not in record.plans[0]
    assert "DataDependentOutputException" in record.plans[0]["unpredicted"]
    assert len(record.rounds) == 3


def test_who_asks_for_it_is_warned(tmp_path):
    with pytest.warns(UserWarning, match="the memory of a step is not predicted"):
        run(tmp_path, make=Reads, predict_memory=True)


def test_a_prediction_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "LIMIT", 0.0)
    _, record = run(tmp_path)
    assert "it took more than" in record.plans[0]["unpredicted"]


def test_the_plan_line_has_the_reason_once(tmp_path):
    run(tmp_path, make=Reads)
    lines = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert ["unpredicted" in line for line in lines if line["kind"] == "plan"] == [False, True]
