"""Gradients that are not finite, replicas that come apart, and batches that nobody expects."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

from fleetx import NumbersError, UsageError, WorldError, fleet
from fleetx.engine import numbers
from training import assert_equal, batches, net, sgd, share, train, train_fleet, weights, zero_last

CPU = torch.device("cpu")


class Honest(nn.Module):
    """Lets a bad sample through to its output: tanh alone would turn inf into 1."""

    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x, ones):
        return self.body(x) * ones.mean(1, keepdim=True)


def _poisoned(value, declared, at=2, steps=6, **checks):
    """Train on batches of which one has a bad sample on rank 1; return the weights and what was said."""
    fleet.init(checks=fleet.Checks(**checks))
    model = Honest()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    data = share(batches(steps), fleet.worker_index(), fleet.worker_num())
    if fleet.worker_index() == fleet.worker_num() - 1:
        data[at][0][0, 0] = value
    updated = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in data:
            fleet.forward_backward((x, x / x), y, loss_fn=nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
            updated.append(fleet.updated)
    return weights(model), updated, [str(w.message) for w in caught if "finite" in str(w.message)]


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("declared", [{}, {"clip": True}, {"gradient_merge": True}], ids=str)
def test_the_same_update_is_skipped_on_all_ranks_and_the_rank_is_named(ranks, value, declared):
    (first, updated, said), (second, also, _) = ranks.run(_poisoned, value, declared)
    assert updated == also == [True, True, False, True, True, True]
    assert_equal(first, second)
    assert all(torch.isfinite(p).all() for p in first.values())
    assert said == [
        "step 3: the gradient of 'body.0.weight' is not finite; the loss was not finite on rank 1. The update "
        "is skipped (1 in a row)"
    ]


def test_under_sharding_all_ranks_skip_too(ranks):
    (updated, said), (also, _) = ranks.run(_poisoned_shards)
    assert updated == also == [True, True, False, True, True, True]
    assert "is not finite; the loss was not finite on rank 1" in said[0]


def _poisoned_shards():
    _, updated, said = _poisoned(math.nan, {"sharding": True})
    return updated, said


def _alone(value, on, in_a_row=2):
    fleet.init(checks=fleet.Checks(on_nonfinite=on, in_a_row=in_a_row))
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in batches(4):
            zero_last(model, optimizer, x * value, y)


def test_it_stops_after_so_many_in_a_row_or_at_once():
    with pytest.raises(NumbersError, match=r"step 2: .* is not finite, 2 times in a row. Lower the learning rate"):
        _alone(math.nan, "skip")


def test_it_stops_at_once_if_told():
    with pytest.raises(NumbersError, match=r"step 1: the gradient of '0.weight' is not finite.*on_nonfinite='stop'"):
        _alone(math.nan, "stop")


def test_without_a_checkpoint_there_is_nothing_to_restore():
    with pytest.raises(NumbersError, match="there is no checkpoint to restore"):
        _alone(math.nan, "restore")


def test_ignored_means_plain_pytorch():
    fleet.init(checks=fleet.Checks(on_nonfinite="ignore"))
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    zero_last(model, optimizer, batches(1)[0][0] * math.nan, batches(1)[0][1])
    assert fleet.updated
    assert torch.isnan(model[0].weight).all()


@pytest.mark.parametrize("every", [False, True])
def test_large_gradients_are_seen_if_asked_for(every):
    grads = [torch.zeros(8), torch.full((numbers.SMALL + 1,), math.nan)]
    chosen = numbers._chosen(grads, every=every)
    assert bool(numbers._suspect(chosen, CPU)) is every
    assert bool(numbers._not_finite(chosen, CPU)) is every


def _wide(strategy=None, **checks):
    """One matrix that is too large to be looked at, with a hook that spoils its gradient once."""
    fleet.init(checks=fleet.Checks(**checks))
    model = nn.Sequential(nn.Linear(4, 1100, bias=False), nn.Linear(1100, 2))
    assert model[0].weight.numel() > numbers.SMALL
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**(strategy or {})))

    def step(value=None):
        model(torch.ones(3, 4)).square().mean().backward()
        if value is not None:
            model[0].weight.grad[0, 0] = value
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@pytest.mark.filterwarnings("ignore:step .* the gradient of '0.weight' is not finite")
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_clip_sees_every_gradient(value):
    model, step = _wide({"clip": {"clip_norm": 0.1}})
    step()
    before = model[0].weight.clone()
    step(value)
    assert not fleet.updated
    assert torch.equal(model[0].weight, before)


def test_a_parameter_that_is_not_finite_is_found_later():
    _, step = _wide(same_parameters=2)
    step()
    with pytest.raises(NumbersError, match=r"parameter '0.weight' is not finite after 2 updates.*every_gradient=True"):
        step(math.nan)


def test_a_gradient_whose_square_overflows_is_finite():
    assert not numbers._not_finite([torch.full((4,), 1e30)], CPU)
    assert not numbers._not_finite([], CPU)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "dtypes", [["float32"], ["float16"], ["bfloat16"], ["float64"], ["float32", "bfloat16"]], ids=str
)
@pytest.mark.parametrize("sizes", [[3, 5], [3, 2 * numbers.MOST * numbers.SMALL]], ids=str)
def test_the_quick_look_misses_nothing(value, dtypes, sizes):
    fine = [torch.ones(2, n, dtype=getattr(torch, dtype)) for n in sizes for dtype in dtypes]
    assert not numbers._suspect(fine, CPU)
    for i in range(len(fine)):
        spoiled = [g.clone() for g in fine]
        spoiled[i][1, 2] = value
        assert numbers._suspect(spoiled, CPU)
        spoiled[i][0, 0] = -value  # inf - inf
        assert numbers._suspect(spoiled, CPU)


@pytest.mark.parametrize("strategy", [{}, {"clip": {"clip_norm": 1.0}}], ids=str)
def test_a_sum_that_overflows_withholds_nothing(strategy):
    fleet.init()
    model = nn.Linear(4, 2)
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**strategy))
    model(torch.ones(3, 4)).sum().backward()
    model.bias.grad[:] = 3e38  # their sum is inf
    optimizer.step()
    assert fleet.updated


@pytest.mark.parametrize("wrong", [{"on_nonfinite": "skp"}, {"in_a_row": 0}, {"same_parameters": -1}], ids=str)
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match="must be"):
        fleet.Checks(**wrong)


# --- replicas -------------------------------------------------------------------------------------
def _flipped(rank, every):
    fleet.init(checks=fleet.Checks(same_parameters=every))
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    for i, (x, y) in enumerate(share(batches(8, 8), fleet.worker_index(), fleet.worker_num())):
        if i == 3 and fleet.worker_index() == rank:
            model[2].weight.data.view(torch.int32)[3, 5] ^= 1 << 12  # the update may round lower bits away
        try:
            zero_last(model, optimizer, x, y)
        except NumbersError as error:
            return i + 1, str(error)
    return None


def test_one_flipped_bit_is_found_and_its_rank_named_by_majority(four):
    for found in four.run(_flipped, 2, 2):
        step, text = found
        assert step == 4
        assert "the parameters of rank 2 differ from the others, first in '2.weight', after 4 updates" in text


def test_equal_changes_of_two_parameters_do_not_cancel_out():
    digests = torch.randint(-(2**62), 2**62, (50,))
    swapped, flipped = digests[[1, 0, *range(2, 50)]], digests.clone()
    flipped[3] ^= 1
    flipped[4] ^= 1
    assert len({int(numbers._combined(each)) for each in (digests, swapped, flipped)}) == 3


def test_two_ranks_that_differ_are_both_named(ranks):
    for step, text in ranks.run(_flipped, 1, 2):
        assert step == 4
        assert "the parameters of ranks 0, 1 differ" in text


def test_nothing_is_compared_if_told(ranks):
    assert ranks.run(_flipped, 1, 0) == [None, None]


@pytest.mark.parametrize(
    "declared", [{"localsgd": {"k_steps": 3}}, {"dgc": True}, {"sharding": True}, {"amp": True}], ids=str
)
def test_replicas_of_every_strategy_agree(ranks, declared):
    assert ranks.run(_agree, declared) == [True, True]


def _agree(declared):
    fleet.init(checks=fleet.Checks(same_parameters=1))
    train_fleet(batches(6), declared)
    return True


# --- versions -------------------------------------------------------------------------------------
def _other_torch():
    fleet.init()
    model, before = net(), torch.__version__
    if fleet.worker_index() == 1:
        torch.__version__ = "2.12.1"
    try:
        fleet.distribute(model, sgd(model))
    except WorldError as error:
        return str(error)
    finally:
        torch.__version__ = before
    return ""


def test_another_version_of_torch_is_named(ranks):
    for text in ranks.run(_other_torch):
        assert f"torch = '{torch.__version__}' on rank 0, '2.12.1' on rank 1" in text
        assert "Install the same versions" in text


def _other_checks():
    rank = torch.distributed.get_rank()
    fleet.init(checks=fleet.Checks(in_a_row=5 + rank))
    model = net()
    try:
        fleet.distribute(model, sgd(model))
    except WorldError as error:
        return "checks = " in str(error)
    return False


def test_other_checks_on_one_rank_are_named(ranks):
    assert ranks.run(_other_checks) == [True, True]


# --- odd batches ----------------------------------------------------------------------------------
def test_a_sample_of_1e38_trains_like_plain_pytorch_or_is_skipped():
    data = batches(3)
    data[1][0][0, 0] = 1e38
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = train_fleet(data, {})
    assert all(torch.isfinite(p).all() for p in got.values())


def _empty():
    fleet.init(checks=fleet.Checks(same_parameters=1))
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    x, y = batches(1)[0]
    n = 0 if fleet.worker_index() == 1 else 4
    fleet.forward_backward(x[:n], y[:n], loss_fn=nn.functional.mse_loss)  # the mean of nothing is nan
    optimizer.step()
    return fleet.updated, weights(model)


def test_an_empty_batch_on_one_rank_counts_as_a_gradient_of_zero_as_in_ddp(ranks):
    (updated, first), (also, second) = ranks.run(_empty)
    assert updated
    assert also
    assert_equal(first, second)
    assert all(torch.isfinite(p).all() for p in first.values())


def test_a_label_out_of_range_is_torch_s_own_error():
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    with pytest.raises(IndexError, match="out of bounds"):
        nn.functional.cross_entropy(model(torch.ones(2, 6)), torch.tensor([0, 7])).backward()
    before = weights(model)
    nn.functional.cross_entropy(model(torch.ones(2, 6)), torch.tensor([0, 2])).backward()  # and training goes on
    optimizer.step()
    assert not torch.equal(before["0.weight"], model[0].weight)


def _no_data():
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    seen = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in fleet.join(batches(3) if fleet.worker_index() == 0 else []):
            zero_last(model, optimizer, x, y)
            seen += 1
    return seen, [str(w.message) for w in caught]


def test_a_rank_without_data_is_named_by_join(ranks):
    said = ["rank 1 ran out of batches after 0; the remaining batches of the others are unused"]
    assert ranks.run(_no_data) == [(0, said), (0, said)]


def test_finite_training_is_untouched():
    assert_equal(train_fleet(batches(6), {}), train(batches(6)))
    assert UsageError is not NumbersError
