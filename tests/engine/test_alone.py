"""What one rank calls alone works, or is an error within seconds that names the rank, the call and the way out."""

from __future__ import annotations

import time

import pytest
import torch
from torch.nn.functional import mse_loss

from fleetx import UsageError, fleet
from training import batches, net, sgd, share, zero_last

SHARDING = [{"sharding": {"stage": 1}}, {"sharding": {"stage": 3}}]


def evaluate(model):
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 6))
    model.train()


def without_no_grad(model):
    model.eval()
    model(torch.ones(2, 6))
    model.train()


def flush(model):
    fleet.flush()


def alone(settings, call, before=lambda model: None):
    """Rank 0 makes a call while rank 1 trains on. Returns the error and how long it took."""
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**settings))
    x, y = batches(1)[0]
    before(model)
    zero_last(model, optimizer, x, y)
    before(model)
    said, start = "", time.monotonic()
    try:
        if fleet.worker_index() == 0:
            call(model)
    except UsageError as error:
        said = str(error)
    took = time.monotonic() - start
    model.train()
    for _ in range(3):
        zero_last(model, optimizer, x, y)  # where rank 1 waits for rank 0
    return said, took


@pytest.mark.parametrize("settings", SHARDING, ids=str)
@pytest.mark.parametrize("call", [evaluate, without_no_grad])
def test_an_evaluation_of_a_sharded_model_is_an_error(ranks, settings, call):
    said, took = ranks.run(alone, settings, call)[0]
    assert said == (
        "rank 0 is evaluating, but rank 1 has continued training: a rank has only part of the model, so "
        "every rank must evaluate, with the same number of batches (`for batch in fleet.join(loader)` stops all ranks "
        "together)"
    )
    assert took < 60


def test_also_after_one_that_all_ranks_made(ranks):
    said, _ = ranks.run(alone, SHARDING[1], evaluate, evaluate)[0]
    assert said.startswith("rank 0 is evaluating, but rank 1 has continued training")


def test_a_flush_is_an_error(ranks):
    said, took = ranks.run(alone, {"gradient_merge": {"k_steps": 2}}, flush)[0]
    assert said.startswith("rank 0 is in fleet.flush, but rank 1 has continued training: every rank must call")
    assert took < 60


def test_a_flush_that_has_nothing_to_do_is_none(ranks):
    assert ranks.run(alone, {"clip": True}, flush)[0][0] == ""


@pytest.mark.parametrize("call", [evaluate, without_no_grad])
def test_an_evaluation_under_data_parallelism_is_possible(ranks, call):
    assert ranks.run(alone, {}, call)[0][0] == ""


def unequal():
    """Rank 0 has one batch more to evaluate."""
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(sharding=True))
    said = ""
    try:
        for _ in range(3 - fleet.worker_index()):
            evaluate(model)
    except UsageError as error:
        said = str(error)
    zero_last(model.train(), optimizer, *batches(1)[0])
    return said


def test_unequal_numbers_of_batches(ranks):
    said, other = ranks.run(unequal)
    assert "rank 0 is evaluating, but rank 1 has continued training" in said
    assert other == ""


def different_calls(folder):
    fleet.init()
    model = net()
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(sharding=True))
    with pytest.raises(UsageError) as error:
        evaluate(model) if fleet.worker_index() == 0 else fleet.save(folder)
    return str(error.value)


def test_another_call_on_the_other_rank_is_named(ranks, tmp_path):
    first, second = ranks.run(different_calls, tmp_path / "here")
    assert first.startswith("rank 0 is evaluating, but rank 1 is in fleet.save")
    assert second.startswith("rank 1 is in fleet.save, but rank 0 is evaluating")


def one_group():
    """Two groups of two ranks hold one copy each; the first evaluates alone."""
    fleet.init()
    model = net()
    declared = {"sharding": {"sharding_degree": 2, "hybrid_dp": True}}
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    for x, y in share(batches(3), fleet.worker_index(), 4):
        if fleet.worker_index() < 2:
            evaluate(model)
        zero_last(model, optimizer, x, y)
    return True


def test_a_group_that_holds_a_copy_may_evaluate_alone(four):
    assert all(four.run(one_group))


def staged():
    fleet.init()
    model = net()
    declared = {"pipeline": {"micro_batch": 2, "degree": 2, "stages": ["2"]}}
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    x, y = batches(1)[0]
    said = ""
    try:
        if fleet.worker_index() == 0:
            with torch.no_grad():
                fleet.forward_backward(x, y, loss_fn=mse_loss)
    except UsageError as error:
        said = str(error)
    for _ in range(2):
        fleet.forward_backward(x, y, loss_fn=mse_loss)
        optimizer.step()
    return said


def test_an_evaluation_of_a_pipeline_is_an_error(ranks):
    assert ranks.run(staged)[0].startswith("rank 0 is evaluating, but rank 1 has continued training")
