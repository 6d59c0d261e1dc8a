from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fleetx import UsageError, fleet
from fleetx.comm.session import current, reset
from fleetx.fleet.noise import _student, estimate
from training import assert_equal, batches, net, sgd, share, train_fleet, weights, with_fleet_backward

ON = {"noise_scale": {"every": 1}}
SIZE, SPREAD, FEED = 12, 2.0, 4
W = torch.linspace(-1, 1, SIZE)
TRUTH = SIZE * SPREAD**2 / float(W.square().sum())


class Point(nn.Module):
    """Its loss is mean |w - x|^2 / 2, so the gradient of a sample is w - x: its mean is w, its variance that of x."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(W.clone())

    def forward(self, x):
        return (self.w - x).square().sum(1).mean() / 2


def samples(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [SPREAD * torch.randn(FEED, SIZE, generator=generator) for _ in range(n)]


def build(declared, lr=0.0):
    reset()
    fleet.init()
    model = Point()
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=lr), fleet.DistributedStrategy(**declared))


def run(declared, updates, seed=0):
    """At the rate 0, so that the gradient stays the same."""
    model, o = build({**ON, **declared})
    merged = declared.get("gradient_merge", {}).get("k_steps", 1)
    for x in samples(updates * merged, seed + 1000 * fleet.worker_index()):
        model(x).backward()
        o.step()
        o.zero_grad()
    return fleet.noise_scale(), current().find(model).state["NoiseScale"]


def squares_by_hand(updates, merged, ranks):
    """Of the first step's gradient on each rank, and of the whole update's."""
    data = [samples(updates * merged, 1000 * rank) for rank in range(ranks)]
    rows = []
    for i in range(0, updates * merged, merged):
        whole = torch.cat([x for rank in data for x in rank[i : i + merged]])
        firsts = [float((W - rank[i].mean(0)).square().sum()) for rank in data]
        rows.append((firsts, float((W - whole.mean(0)).square().sum())))
    return rows


MERGED = [{"gradient_merge": {"k_steps": 4}}, {"gradient_merge": {"k_steps": 4}, "clip": {"clip_norm": 0.1}}]


@pytest.mark.parametrize("declared", MERGED, ids=str)
def test_merged_steps_give_the_norms_of_the_first_step_and_of_the_whole_window(declared):
    _, state = run(declared, 10)
    want = [[firsts[0], big] for firsts, big in squares_by_hand(10, 4, 1)]
    torch.testing.assert_close(state["squares"][:10], torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=0)
    assert state["steps"] == [4] * 10


def test_a_loss_scale_is_taken_out_of_the_norms():
    _, state = run({"gradient_merge": {"k_steps": 2}, "amp": {"init_loss_scaling": 1024.0}}, 10)
    want = [[firsts[0], big] for firsts, big in squares_by_hand(10, 2, 1)]
    torch.testing.assert_close(state["squares"][:10], torch.tensor(want, dtype=torch.float64), rtol=2e-2, atol=0)


@pytest.mark.parametrize("merged", [1, 2])
def test_ranks_give_the_norms_of_each_and_of_all(merged, ranks):
    declared = {"gradient_merge": {"k_steps": merged}, "clip": {"clip_norm": 0.1}}
    want = squares_by_hand(10, merged, 2)
    for rank, (_, state) in enumerate(ranks.run(run, declared, 10)):
        rows = torch.tensor([[firsts[rank], big] for firsts, big in want], dtype=torch.float64)
        torch.testing.assert_close(state["squares"][:10], rows, rtol=1e-5, atol=0)
        assert state["steps"] == [2 * merged] * 10


# --- the estimate ---------------------------------------------------------------------------------
def test_the_answer_of_a_problem_in_closed_form_is_within_the_confidence():
    found, _ = run({"gradient_merge": {"k_steps": 8}}, 250)
    assert found.measurements == 250
    assert found.feed == FEED
    assert found.low < TRUTH < found.high
    assert found.high < 2 * found.low
    assert found.gradient == pytest.approx(float(W.square().sum()), rel=0.1)
    assert found.noise == pytest.approx(SIZE * SPREAD**2, rel=0.1)


def test_two_ranks_know_it_without_merging(ranks):
    a, b = (found for found, _ in ranks.run(run, {}, 250))
    assert a == b
    assert a.low < TRUTH < a.high


def uneven(seed):
    """Each fifth step has a batch of one sample, also the last step."""
    model, o = build({**ON, "gradient_merge": {"k_steps": 2}})
    for i, x in enumerate(samples(400, seed + fleet.worker_index())):
        model(x[:1] if i % 5 == 4 else x).backward()
        o.step()
        o.zero_grad()
    return fleet.noise_scale(), fleet.noise_scale(feed=FEED)


def test_batches_of_unequal_sizes_count_with_their_own():
    found, as_if_equal = uneven(0)
    assert found.noise == pytest.approx(SIZE * SPREAD**2, rel=0.1)
    assert found.low < TRUTH < found.high
    assert as_if_equal.low > TRUTH


def test_ranks_may_have_batches_of_unequal_sizes(ranks):
    (a, _), (b, _) = ranks.run(uneven, 7)
    assert a == b
    assert a.noise == pytest.approx(SIZE * SPREAD**2, rel=0.1)
    assert a.low < TRUTH < a.high


def test_a_shorter_last_batch_does_not_change_what_was_measured_before():
    model, o = build({**ON, "gradient_merge": {"k_steps": 2}})
    for x in samples(40):
        model(x).backward()
        o.step()
        o.zero_grad()
    before = fleet.noise_scale()
    model(samples(1)[0][:1]).backward()
    o.step()
    assert fleet.noise_scale() == before


def test_the_interval_contains_the_truth_about_as_often_as_it_says():
    """400 experiments of 32 measurements each."""
    generator = torch.Generator().manual_seed(0)
    hits, n = 0, 8
    for _ in range(400):
        steps = W + SPREAD * torch.randn(32, n, FEED, SIZE, generator=generator).mean(2)
        pairs = torch.stack([steps[:, 0].square().sum(1), steps.mean(1).square().sum(1)], 1)
        found = estimate(pairs.tolist(), [(FEED, n * FEED)] * 32)
        hits += found.low <= TRUTH <= found.high
    assert 0.90 <= hits / 400 <= 0.99


def test_without_a_gradient_there_is_no_upper_bound():
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(32, 4, SIZE, generator=generator)
    pairs = torch.stack([steps[:, 0].square().sum(1), steps.mean(1).square().sum(1)], 1)
    found = estimate(pairs.tolist(), [(1, 4)] * 32)
    assert math.isinf(found.high)
    assert "no upper bound" in str(found)


def test_the_quantiles_of_student_are_those_of_tables():
    for freedom, value in ((7, 2.365), (10, 2.228), (30, 2.042), (255, 1.969)):
        assert _student(0.975, freedom) == pytest.approx(value, abs=5e-3)


def test_only_the_last_measurements_count():
    found, state = run({"noise_scale": {"every": 1, "window": 8}, "gradient_merge": {"k_steps": 2}}, 20)
    assert found.measurements == 8
    assert state["count"] == 20
    assert state["squares"].shape == (8, 2)


# --- training -------------------------------------------------------------------------------------
def test_training_is_the_same_bit_for_bit():
    merge = {"gradient_merge": {"k_steps": 2}}
    assert_equal(train_fleet(batches(), {**ON, **merge}), train_fleet(batches(), merge))


def test_an_update_that_is_skipped_is_not_measured():
    model, o = build({**ON, "gradient_merge": {"k_steps": 2}})
    bad = samples(2)
    bad[0][0, 0] = math.nan
    model(bad[0]).backward()
    o.step()
    model(bad[1]).backward()
    with pytest.warns(UserWarning, match="not finite"):
        o.step()
    assert current().find(model).state["NoiseScale"]["count"] == 0


def test_a_ramp_up_is_measured_with_its_batches():
    _, state = run({"gradient_merge": {"k_steps": 3, "rampup": [[4, 2]]}}, 10)
    assert state["steps"] == [2] * 4 + [3] * (len(state["steps"]) - 4)


def resumed(folder):
    def training():
        reset()
        fleet.init()
        model = net()
        return fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**ON))

    model, o = training()
    data = share(batches(20), fleet.worker_index(), fleet.worker_num())
    for i, (x, y) in enumerate(data):
        with_fleet_backward(model, o, x, y)
        if i == 9:
            fleet.save(folder)
    want = fleet.noise_scale(), weights(model)
    again, o2 = training()
    fleet.load(folder)
    for x, y in data[10:]:
        with_fleet_backward(again, o2, x, y)
    assert_equal(weights(again), want[1])
    return fleet.noise_scale() == want[0]


def test_a_run_resumes_with_what_it_has_measured(ranks, tmp_path):
    assert ranks.run(resumed, tmp_path / "saved") == [True, True]


# --- errors ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({}, r"turn strategy\.noise_scale on"),
        (ON, "one replica of the model and no gradient_merge"),
        ({**ON, "gradient_merge": {"k_steps": 2}}, "needs 8 measured updates, and there are 0"),
    ],
)
def test_where_it_cannot_be_known_the_error_says_why(declared, message):
    build(declared)
    with pytest.raises(UsageError, match=message):
        fleet.noise_scale()


def test_explain_says_that_it_cannot_be_known_here():
    build(ON)
    assert "noise_scale: cannot be measured here" in str(fleet.explain())


def called_twice(extra):
    model, o = build({**ON, "gradient_merge": {"k_steps": 2}})
    for x in samples(20):
        loss = model(x)
        extra(model, x)
        loss.backward()
        o.step()
        o.zero_grad()


def test_several_forwards_in_a_step_are_an_error_unless_the_samples_are_given():
    called_twice(lambda model, x: model(x))
    with pytest.raises(UsageError, match=r"in 10 of 10 measured updates the number of .* pass feed"):
        fleet.noise_scale()
    assert fleet.noise_scale(feed=FEED).feed == FEED


def test_an_evaluation_without_gradients_does_not_count():
    def evaluate(model, x):
        with torch.no_grad():
            model(torch.cat([x] * 5))

    called_twice(evaluate)
    assert fleet.noise_scale().feed == FEED
