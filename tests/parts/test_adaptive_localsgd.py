from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch.nn.functional import mse_loss

from fleetx import StrategyError, UsageError, fleet
from fleetx.engine.context import StepContext
from training import assert_close, batches, net, share, train


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def run(settings, rates=None, rounds=12):
    """The rounds of the averages and the periods, the losses, and the weights."""
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, plain_sgd(model), fleet.DistributedStrategy(adaptive_localsgd=settings))
    state = fleet._engine(model).state["AdaptiveLocalSGD"]
    periods, losses = [], []
    for i, (x, y) in enumerate(share(batches(rounds), fleet.worker_index(), fleet.worker_num())):
        if rates:
            optimizer.param_groups[0]["lr"] = rates[i]
        losses.append(fleet.forward_backward(x, y, loss_fn=mse_loss).item())
        optimizer.step()
        optimizer.zero_grad()
        periods.append((state["last"][0], state["k"]))
    return periods, losses, {k: v.clone() for k, v in model.state_dict().items()}


def test_a_maximum_period_of_one_is_data_parallelism(ranks):
    expected = train(batches(12), optimizer=plain_sgd)
    for _, _, got in ranks.run(run, {"max_k_steps": 1}):
        assert_close(got, expected)


@pytest.mark.parametrize("rates", [None, [0.1] * 4 + [0.01] * 8], ids=["constant", "falling"])
def test_the_period_follows_the_formula(ranks, rates):
    settings = {"init_k_steps": 3, "begin_step": 2, "max_k_steps": 7}
    (periods, first, _), (same, second, _) = ranks.run(run, settings, rates)
    assert periods == same
    losses = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    rates = rates or [0.1] * 12
    k, last, expected = 3, 0, []
    for step, (loss, lr) in enumerate(zip(losses, rates, strict=True), start=1):
        if step <= 2 or step - last >= k:
            last = step
            if step > 2:
                k = min(max(math.ceil(math.sqrt(rates[0] * loss / (lr * losses[0])) * 3), 1), 7)
        expected.append((last, k))
    assert periods == expected
    assert len({k for _, k in periods}) > 1


def test_a_plain_backward_is_an_error_because_the_loss_is_needed():
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(
        model, plain_sgd(model), fleet.DistributedStrategy(adaptive_localsgd={"allow_single": True})
    )
    x, y = batches(1)[0]
    mse_loss(model(x), y).backward()
    with pytest.raises(UsageError, match=r"call fleet.backward\(loss\)"):
        optimizer.step()


def test_a_new_period_is_logged(caplog):
    caplog.set_level("INFO", logger="fleetx")
    run({"allow_single": True, "init_k_steps": 4})
    assert any("period changed from" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_k_steps": 20}, "init_k_steps = 20: must be at most max_k_steps = 16"),
        ({"overlap": True, "average_momentum": True}, "overlap with average_momentum is not supported yet"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(StrategyError, match=message):
        fleet.DistributedStrategy(adaptive_localsgd=settings).plan()


def test_one_worker_has_nothing_to_communicate():
    fleet.init()
    model = net()
    with pytest.raises(StrategyError, match="nothing to communicate"):
        fleet.distribute(model, plain_sgd(model), fleet.DistributedStrategy(adaptive_localsgd=True))


def first_batch(how):
    """The reference loss and the period, if rank 1 does something else with its first batch."""
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(
        model, plain_sgd(model), fleet.DistributedStrategy(adaptive_localsgd={"init_k_steps": 2})
    )
    state, known = fleet._engine(model).state["AdaptiveLocalSGD"], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 1 says that the update is skipped
        for i, (x, y) in enumerate(share(batches(6), fleet.worker_index(), 2)):
            if fleet.worker_index() == 0 or i or how != "left out":
                bad = fleet.worker_index() == 1 and i == 0 and how == "nan"
                loss = mse_loss(model(x * math.nan if bad else x), y)
                loss.backward() if how == "unseen" else fleet.backward(loss)
            try:
                optimizer.step()
            except UsageError as error:
                return str(error)
            optimizer.zero_grad()
            known.append(state["loss"] > 0)
    return known, state["k"]


@pytest.mark.parametrize(("how", "first"), [("left out", True), ("nan", False)])
def test_a_rank_may_leave_out_or_skip_its_first_batch(ranks, how, first):
    found, same = ranks.run(first_batch, how)
    assert found == same
    assert found[0] == [first] + [True] * 5


def test_an_unseen_loss_is_an_error_on_every_rank(ranks):
    found, same = ranks.run(first_batch, "unseen")
    assert found == same
    assert "call fleet.backward(loss)" in found


def losses_of_those_with_a_batch():
    """The mean losses that the ranks see, if rank 1 has no batch from the third step on."""
    fleet.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    declared = fleet.DistributedStrategy(adaptive_localsgd={"init_k_steps": 1})
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-9), declared)
    seen, of_the_step = [], StepContext.loss
    StepContext.loss = lambda ctx: (seen.append(of_the_step(ctx)), seen[-1])[1]
    try:
        for value in (100.0, 100.0, 1.0, 1.0):
            if fleet.worker_index() == 0 or value > 1:
                fleet.backward(model(torch.full((1, 1), value)).sum())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        StepContext.loss = of_the_step
    return seen


def test_the_loss_of_an_earlier_batch_does_not_count(ranks):
    for seen in ranks.run(losses_of_those_with_a_batch):
        assert seen == pytest.approx([100, 100, 1, 1], rel=1e-3)
