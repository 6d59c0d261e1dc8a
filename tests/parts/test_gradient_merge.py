"""k merged batches equal one big batch; a shorter window at the end is divided by its own length."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile

from fleetx import fleet
from training import (
    LOOPS,
    adamw,
    assert_close,
    assert_equal,
    batches,
    big,
    net,
    sgd,
    share,
    train,
    train_fleet,
    weights,
    zero_last,
)


@pytest.mark.parametrize(("loop", "optimizer"), list(zip(LOOPS, [sgd, adamw, sgd], strict=True)))
def test_k_merged_batches_equal_one_big_batch(loop, optimizer):
    data = batches()
    merged = train_fleet(data, {"gradient_merge": {"k_steps": 4}}, optimizer=optimizer, loop=loop)
    assert_close(merged, train(big(data, 4), optimizer=optimizer))


@pytest.mark.parametrize(("loop", "optimizer"), list(zip(LOOPS, [adamw, sgd, adamw], strict=True)))
def test_two_ranks_that_merge_equal_one_rank_with_the_big_batch(ranks, loop, optimizer):
    data = batches()
    found = ranks.run(_merge, data, loop, optimizer)
    want = train(big(data, 4), optimizer=optimizer)
    assert_equal(found[0], found[1])
    assert_close(found[0], want)


def _merge(data, loop, optimizer):
    return train_fleet(data, {"gradient_merge": {"k_steps": 4}}, optimizer=optimizer, loop=loop)


def test_one_step_is_plain_pytorch_bit_for_bit():
    assert_equal(train_fleet(batches(), {"gradient_merge": {"k_steps": 1}}), train(batches()))


def test_without_avg_the_update_uses_the_sum():
    data = batches()
    merged = train_fleet(data, {"gradient_merge": {"k_steps": 2, "avg": False}}, optimizer=_sgd(0.1))
    assert_close(merged, train(big(data, 2), optimizer=_sgd(0.2)))


def test_without_avg_merged_sums_equal_the_sum_over_the_big_batch(ranks):
    """Ranks still average, so that two of them halve the sum."""
    data = batches()
    want = train(big(data, 2), optimizer=_sgd(0.01), loop=summed)
    assert_close(_merge_sums(data, 0.01), want)
    found = ranks.run(_merge_sums, data, 0.02)
    assert_equal(found[0], found[1])
    assert_close(found[0], want)


def summed(model, optimizer, x, y):
    mse_loss(model(x), y, reduction="sum").backward()
    optimizer.step()
    optimizer.zero_grad()


def _merge_sums(data, lr):
    return train_fleet(data, {"gradient_merge": {"k_steps": 2, "avg": False}}, optimizer=_sgd(lr), loop=summed)


def _sgd(lr):
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr)


@settings(max_examples=25)
@given(n=st.integers(1, 13), k=st.integers(1, 6))
def test_a_flushed_window_is_divided_by_its_own_length(n, k):
    """With gradient 1 and learning rate 1, every window, full or not, moves the weight by exactly one."""
    model, optimizer = _one_weight(k)
    for _ in range(n):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    applied = fleet.flush(optimizer=optimizer)
    assert applied == (n % k != 0)
    assert model.weight.item() == -float(-(-n // k))


def _one_weight(k):
    fleet.init()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return fleet.distribute(model, optimizer, fleet.DistributedStrategy(gradient_merge={"k_steps": k}))


def test_flush_reduces_between_ranks_and_clears_the_gradients(ranks):
    data = batches(6)
    found = ranks.run(_merge_and_flush, data)
    want = train([*big(data[:4], 4), *big(data[4:], 2)], optimizer=adamw)
    assert_equal(found[0], found[1])
    assert_close(found[0], want)


def _merge_and_flush(data):
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(
        model, adamw(model), fleet.DistributedStrategy(gradient_merge={"k_steps": 4}, fuse_grad_size_in_MB=0.0005)
    )
    for x, y in share(data, fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
    assert fleet.flush()
    assert all(p.grad is None for p in model.parameters())
    assert not fleet.flush()
    return weights(model)


def test_eight_steps_with_k_of_four_take_exactly_two_reductions(ranks):
    assert ranks.run(_count_reductions) == [2, 2]


def _count_reductions():
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(gradient_merge={"k_steps": 4}))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for x, y in batches(8):
            zero_last(model, optimizer, x, y)
    return sum(e.name == "gloo:all_reduce" for e in seen.events())


@pytest.mark.parametrize("extra", [{}, {"clip": {"clip_norm": 0.5}}, {"amp": {"dtype": "float16"}}])
def test_a_run_resumed_inside_a_window_equals_the_uninterrupted_run_bit_for_bit(extra):
    data = batches(10)
    model, optimizer, scheduler = _build(extra)
    for i, (x, y) in enumerate(data):
        zero_last(model, optimizer, x, y)
        scheduler.step()
        if i == 5:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    again, optimizer2, scheduler2 = _build(extra)
    again.load_state_dict(saved[0])
    optimizer2.load_state_dict(saved[1])
    scheduler2.load_state_dict(saved[2])
    for x, y in data[6:]:
        zero_last(again, optimizer2, x, y)
        scheduler2.step()
    assert_equal(weights(model), weights(again))
    assert optimizer.param_groups[0]["lr"] == optimizer2.param_groups[0]["lr"]


def _build(extra):
    fleet.init()
    model = net()
    strategy = fleet.DistributedStrategy(gradient_merge={"k_steps": 4}, **extra)
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def test_two_ranks_resume_inside_a_window_bit_for_bit(ranks):
    for equal in ranks.run(_resume_on_ranks):
        assert equal


def _resume_on_ranks():
    data = share(batches(10), fleet_rank(), 2)
    model, optimizer, _ = _build({"amp": {"dtype": "float16"}, "clip": True})
    for i, (x, y) in enumerate(data):
        zero_last(model, optimizer, x, y)
        if i == 6:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, optimizer2, _ = _build({"amp": {"dtype": "float16"}, "clip": True})
    again.load_state_dict(saved[0])
    optimizer2.load_state_dict(saved[1])
    for x, y in data[7:]:
        zero_last(again, optimizer2, x, y)
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def fleet_rank():
    fleet.init()
    return fleet.worker_index()


def test_a_loaded_checkpoint_is_not_changed():
    model, optimizer, _ = _build({})
    (x, y), *_ = batches()
    zero_last(model, optimizer, x, y)
    saved = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(saved["fleetx"]["withheld"])
    optimizer.load_state_dict(saved)
    zero_last(model, optimizer, x, y)
    torch.testing.assert_close(saved["fleetx"]["withheld"], before, rtol=0, atol=0)
