from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss

from fleetx import StrategyError, fleet
from fleetx.optim import Lamb
from training import adam, adamw, assert_close, assert_equal, batches, big, net, train, train_fleet, weights, zero_last

SETTINGS = {"lamb_weight_decay": 0.1}


def alone(model):
    """The same optimizer without a strategy. Epsilon stays that of Adam."""
    return Lamb(model.parameters(), lr=0.01, eps=1e-8, weight_decay=0.1)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_strategy_turns_the_users_adam_into_lamb(kind):
    def plain(model):
        return kind(model.parameters(), lr=0.01, weight_decay=0.0)

    assert_equal(train_fleet(batches(), {"lamb": SETTINGS}, optimizer=plain), train(batches(), optimizer=alone))


def test_merged_gradients_count_as_their_mean():
    data = batches()
    assert_close(
        train_fleet(data, {"lamb": SETTINGS, "gradient_merge": {"k_steps": 4}}, optimizer=adam),
        train(big(data, 4), optimizer=alone),
    )


def train_adam(declared):
    return train_fleet(batches(), declared, optimizer=adam)


def test_two_ranks_equal_one(ranks):
    expected = train(batches(), optimizer=alone)
    for got in ranks.run(train_adam, {"lamb": SETTINGS}):
        assert_close(got, expected)


def test_an_overflow_does_not_change_moments_and_step():
    fleet.init()
    model = net()
    strategy = fleet.DistributedStrategy(lamb=True, amp={"init_loss_scaling": 2.0**15})
    model, optimizer = fleet.distribute(model, adam(model), strategy)
    data = batches()
    zero_last(model, optimizer, *data[0])
    assert fleet.updated
    before = {k: v.clone() for state in optimizer.state.values() for k, v in state.items()}
    (mse_loss(model(data[1][0]), data[1][1]) * float("inf")).backward()
    optimizer.step()
    assert not fleet.updated
    after = {k: v.clone() for state in optimizer.state.values() for k, v in state.items()}
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("always_adapt", [False, True])
def test_excluded_parameters(always_adapt):
    def grouped(model):
        named = list(model.named_parameters())
        return Lamb(
            [
                {"params": [p for n, p in named if "bias" not in n]},
                {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0, "adapt": always_adapt},
            ],
            lr=0.01, eps=1e-8, weight_decay=0.1,
        )  # fmt: skip

    declared = {"lamb": SETTINGS | {"exclude_from_weight_decay": ["b_0"], "always_adapt": always_adapt}}
    assert_close(train_fleet(batches(), declared, optimizer=adam), train(batches(), optimizer=grouped))


def test_the_moments_of_adam_are_kept():
    fleet.init()
    model, data = net(), batches()
    optimizer = adam(model)
    for x, y in data[:4]:
        zero_last(model, optimizer, x, y)
    strategy = fleet.DistributedStrategy(lamb={"exclude_from_weight_decay": ["weight", "bias"]})
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    for x, y in data[4:]:
        zero_last(model, optimizer, x, y)
    assert_equal(weights(model), train(data, optimizer=adam))


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (torch.optim.NAdam, {}, "lamb needs torch.optim.Adam or AdamW, not NAdam"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {}, "not SGD"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), {}, "amsgrad=False"),
        (torch.optim.AdamW, {}, r"its own weight_decay \(0.01\).*pass weight_decay=0 to AdamW"),
        (lambda p: torch.optim.Adam(p, capturable=True), {}, "capturable=False"),
        (Lamb, {}, "already a Lamb: turn strategy.lamb off"),
        (torch.optim.Adam, {"exclude_from_weight_decay": ["norm"]}, "'norm' in exclude_from_weight_decay"),
    ],
)
def test_unsupported_optimizers_and_patterns_raise_an_error(make, settings, message):
    fleet.init()
    model = net()
    with pytest.raises(StrategyError, match=message):
        fleet.distribute(model, make(model.parameters()), fleet.DistributedStrategy(lamb=settings or True))


def test_a_negative_decay_raises_an_error():
    with pytest.raises(StrategyError, match="lamb_weight_decay"):
        fleet.DistributedStrategy(lamb={"lamb_weight_decay": -0.1}).plan()


def test_all_problems_are_reported_together():
    fleet.init()
    model = net()
    with pytest.raises(StrategyError, match=r"(?s)2 problems.*weight_decay=0.*'bn'"):
        fleet.distribute(model, adamw(model), fleet.DistributedStrategy(lamb={"exclude_from_weight_decay": ["bn"]}))
