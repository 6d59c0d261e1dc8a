from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import StrategyError, fleet
from fleetx.optim import Lars
from training import adam, assert_close, assert_equal, batches, big, net, sgd, train, train_fleet, weights, zero_last

SETTINGS = {"lars_coeff": 0.02, "lars_weight_decay": 0.01, "epsilon": 1e-4}


def alone(model):
    """The same optimizer without a strategy."""
    return Lars(model.parameters(), lr=0.1, momentum=0.9, lars_coeff=0.02, weight_decay=0.01, epsilon=1e-4)


def test_the_strategy_turns_the_users_sgd_into_lars():
    assert_equal(train_fleet(batches(), {"lars": SETTINGS}), train(batches(), optimizer=alone))


def test_nesterov_is_kept():
    def nesterov(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def ours(model):
        return Lars(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    assert_equal(train_fleet(batches(), {"lars": True}, optimizer=nesterov), train(batches(), optimizer=ours))


def test_merged_gradients_count_as_their_mean():
    data = batches()
    assert_close(
        train_fleet(data, {"lars": SETTINGS, "gradient_merge": {"k_steps": 4}}), train(big(data, 4), optimizer=alone)
    )


def test_two_ranks_equal_one(ranks):
    expected = train(batches(), optimizer=alone)
    for got in ranks.run(train_fleet, batches(), {"lars": SETTINGS, "gradient_merge": {"k_steps": 1}}):
        assert_close(got, expected)


def test_the_norm_is_that_of_the_unscaled_gradient():
    """With a loss scale of 2^15, the norms of scaled gradients would make every step 2^15 times shorter."""
    half = {"amp": {"init_loss_scaling": 2.0**15}, "lars": SETTINGS}
    torch.testing.assert_close(train_fleet(batches(), half), train(batches(), optimizer=alone), rtol=5e-2, atol=2e-2)
    start, got, expected = weights(net()), train_fleet(batches(), half), train(batches(), optimizer=alone)
    for name in start:
        moved, should = (got[name] - start[name]).norm(), (expected[name] - start[name]).norm()
        assert 0.95 < moved / should < 1.05


@pytest.mark.parametrize("patterns", [["bias"], ["b_0"], ["linear_0.b", "2.bias", "fc_2.b_0"]], ids=str)
def test_excluded_by_torch_names_or_by_paddles(patterns):
    def grouped(model):
        named = list(model.named_parameters())
        return Lars(
            [
                {"params": [p for n, p in named if "bias" not in n]},
                {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0},
            ],
            lr=0.1, momentum=0.9, lars_coeff=0.02, weight_decay=0.01, epsilon=1e-4,
        )  # fmt: skip

    declared = {"lars": SETTINGS | {"exclude_from_weight_decay": patterns}}
    assert_equal(train_fleet(batches(), declared), train(batches(), optimizer=grouped))


def test_batch_norm_is_excluded_by_paddles_name():
    fleet.init()
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2))
    declared = {"exclude_from_weight_decay": ["batch_norm_1", "conv2d_0.b_0"]}
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(lars=declared))
    names = [name for name, _ in model.named_parameters()]
    excluded = [names[i] for i in optimizer.param_groups[0]["excluded"]]
    assert excluded == ["0.bias", "3.weight", "3.bias"]


# --- the optimizer stays the same object ----------------------------------------------------------
def test_it_is_the_same_object_with_the_same_groups():
    fleet.init()
    model = net()
    first, *rest = model.parameters()
    mine = torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.1, momentum=0.9)
    _, optimizer = fleet.distribute(model, mine, fleet.DistributedStrategy(lars=SETTINGS))
    assert optimizer is mine
    assert isinstance(mine, Lars)
    assert [group["lr"] for group in mine.param_groups] == [0.5, 0.1]
    assert [len(group["params"]) for group in mine.param_groups] == [1, 5]


def test_the_momentum_of_sgd_is_kept():
    """With every parameter excluded, training continues as with SGD."""
    fleet.init()
    model, data = net(), batches()
    optimizer = sgd(model)
    for x, y in data[:4]:
        zero_last(model, optimizer, x, y)
    strategy = fleet.DistributedStrategy(lars={"exclude_from_weight_decay": ["weight", "bias"]})
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    for x, y in data[4:]:
        zero_last(model, optimizer, x, y)
    assert_close(weights(model), train(data))


def test_a_scheduler_created_earlier_still_works():
    def run(early):
        fleet.init()
        model = net()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if early else None
        model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(lars=SETTINGS))
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for x, y in batches():
            zero_last(model, optimizer, x, y)
            scheduler.step()
        assert isinstance(optimizer.state[next(iter(model.parameters()))]["velocity"], torch.Tensor)
        return weights(model)

    assert_equal(run(early=True), run(early=False))


def test_a_checkpoint_of_plain_sgd_can_be_loaded_and_keeps_the_strategys_settings():
    fleet.init()
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9, weight_decay=0.3)
    for x, y in batches(3):
        zero_last(plain, optimizer, x, y)
    model = net()
    model, ours = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(lars=SETTINGS))
    ours.load_state_dict(optimizer.state_dict())
    group = ours.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["lars_coeff"]) == (0.2, 0.01, 0.02)
    mse_loss(model(batches(1)[0][0]), batches(1)[0][1]).backward()
    ours.step()
    p = next(iter(model.parameters()))
    assert set(ours.state[p]) == {"velocity"}


# --- bad input ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (torch.optim.RMSprop, {}, "lars needs torch.optim.SGD with momentum, not RMSprop"),
        (lambda p: torch.optim.SGD(p, lr=0.1), {}, "momentum=0.9"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), {}, "dampening=0"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), {}, "second one: pass weight_decay=0"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, differentiable=True), {}, "differentiable=False"),
        (lambda p: Lars(p, lr=0.1), {}, "already a Lars: turn strategy.lars off"),
        (sgd, {"exclude_from_weight_decay": ["bn"]}, "'bn' in exclude_from_weight_decay.* 0.weight = linear_0.w_0"),
        (sgd, {"exclude_from_weight_decay": [""]}, "empty string"),
    ],
)
def test_unsupported_optimizers_and_patterns_raise_an_error(make, settings, message):
    fleet.init()
    model = net()
    optimizer = make(model) if make is sgd else make(model.parameters())
    with pytest.raises(StrategyError, match=message):
        fleet.distribute(model, optimizer, fleet.DistributedStrategy(lars=settings or True))
    assert not isinstance(optimizer, Lars) or "already a Lars" in message


def two_groups(make, **options):
    return lambda model: make([{"params": [p]} for p in model.parameters()], lr=0.1, **options)


@pytest.mark.parametrize(
    ("make", "declared", "messages"),
    [
        (two_groups(torch.optim.SGD, momentum=0.9, dampening=0.1), {"lars": True}, ["lars with dampening"]),
        (two_groups(torch.optim.SGD, momentum=1.5), {"lars": True}, ["lars: momentum must be in"]),
        (two_groups(torch.optim.Adam, amsgrad=True), {"lars": True}, ["lars needs torch.optim.SGD"]),
        (
            two_groups(torch.optim.Adam, eps=0, weight_decay=0.1, amsgrad=True),
            {"lamb": True},
            ["own weight_decay (0.1), and lamb would apply a second", "lamb: eps must be above 0", "lamb with amsgrad"],
        ),
        (
            two_groups(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
            {"lars": {"lars_weight_decay": 0.0}},
            ["own weight_decay (0.1), and lars would replace it with 0: pass weight_decay=0"],
        ),
    ],
)
def test_each_problem_is_named_once(make, declared, messages):
    fleet.init()
    model = net()
    with pytest.raises(StrategyError) as error:
        fleet.distribute(model, make(model), fleet.DistributedStrategy(**declared))
    assert len(error.value.problems) == len(messages), error.value.problems
    for problem, message in zip(error.value.problems, messages, strict=True):
        assert message in problem


def test_a_subclass_with_its_own_step_raises_an_error():
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    fleet.init()
    model = net()
    with pytest.raises(StrategyError, match="not Mine"):
        fleet.distribute(model, Mine(model.parameters(), lr=1, momentum=0.9), fleet.DistributedStrategy(lars=True))


@pytest.mark.parametrize("settings", [{"lars_coeff": -1.0}, {"lars_coeff": 0.0}, {"lars_weight_decay": -0.1}])
def test_coefficients_out_of_range_raise_an_error(settings):
    with pytest.raises(StrategyError, match=next(iter(settings))):
        fleet.DistributedStrategy(lars=settings).plan()


def test_lars_with_lamb():
    with pytest.raises(StrategyError, match="`lamb` and `lars` both change the optimizer's update rule"):
        fleet.DistributedStrategy(lars=True, lamb=True).plan()


def test_explain_names_the_kernels():
    assert "lars: kernels on cpu: " in str(fleet.explain(fleet.DistributedStrategy(lars=True)))


# --- state and groups -------------------------------------------------------------------------------
def test_a_fused_optimizer_leaves_unscaling_to_the_scaler():
    """torch's fused optimizers unscale themselves, and tell GradScaler so."""

    def step(fused):
        fleet.init()
        model = net()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        model, optimizer = fleet.distribute(model, plain, fleet.DistributedStrategy(lars=SETTINGS))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        x, y = batches(1)[0]
        scaler.scale(mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        return weights(model)

    assert_equal(step(fused=True), step(fused=False))


def test_groups_added_later_get_the_strategys_settings_and_the_users_defaults():
    fleet.init()
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD([{"params": model["a"].parameters(), "lr": 1e-5}], lr=0.1, momentum=0.9)
    strategy = fleet.DistributedStrategy(lars=SETTINGS | {"exclude_from_weight_decay": ["bias"]})
    _, optimizer = fleet.distribute(model, optimizer, strategy)
    optimizer.add_param_group({"params": list(model["b"].parameters())})
    late = optimizer.param_groups[1]
    assert (late["lr"], late["weight_decay"], late["lars_coeff"], late["excluded"]) == (0.1, 0.01, 0.02, [1])
    saved = optimizer.state_dict()
    saved["param_groups"][1]["lars_coeff"] = 5.0
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[1]["lars_coeff"] == 0.02


@pytest.mark.parametrize(("name", "make"), [("lars", sgd), ("lamb", adam)], ids=["lars", "lamb"])
def test_a_group_added_later_keeps_the_options_that_it_brings(name, make):
    fleet.init()
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    _, optimizer = fleet.distribute(model, make(model["a"]), fleet.DistributedStrategy(**{name: True}))
    optimizer.add_param_group({"params": list(model["b"].parameters()), "weight_decay": 0.25})
    assert optimizer.param_groups[1]["weight_decay"] == 0.25
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[1]["weight_decay"] == 0.25
    assert optimizer.param_groups[0]["weight_decay"] != 0.25


def test_an_optimizer_that_is_not_accepted_does_not_change():
    fleet.init()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=1.0)
    with pytest.raises(StrategyError, match=r"momentum must be in \[0, 1\)"):
        fleet.distribute(model, optimizer, fleet.DistributedStrategy(lars=True))
    assert type(optimizer) is torch.optim.SGD


def test_momentum_waits_while_the_rate_is_zero():
    fleet.init()
    model, data = net(), batches()
    optimizer = sgd(model)
    zero_last(model, optimizer, *data[0])
    strategy = fleet.DistributedStrategy(lars={"exclude_from_weight_decay": ["weight", "bias"]})
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    p = next(iter(model.parameters()))
    gathered, before = optimizer.state[p]["momentum_buffer"].clone(), p.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    zero_last(model, optimizer, *data[1])
    assert torch.equal(p, before)
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], gathered * 0.9)
    optimizer.param_groups[0]["lr"] = 0.1
    zero_last(model, optimizer, *data[2])
    assert set(optimizer.state[p]) == {"velocity"}


def test_a_checkpoint_of_another_optimizer_raises_an_error():
    fleet.init()
    other = torch.optim.AdamW(net().parameters())
    model = net()
    _, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(lars=True))
    with pytest.raises(ValueError, match="its groups lack momentum"):
        optimizer.load_state_dict(other.state_dict())
    damped = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9, dampening=0.1)
    with pytest.raises(ValueError, match="dampening"):
        optimizer.load_state_dict(damped.state_dict())


def test_torch_names_come_before_paddles_and_tied_weights_have_several():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.body, self.fc = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)
            self.fc.weight = self.table.weight

        def forward(self, x):
            return self.fc(self.body(self.table(x)))

    fleet.init()
    model = Tied()
    strategy = fleet.DistributedStrategy(lars={"exclude_from_weight_decay": ["fc"]})
    _, optimizer = fleet.distribute(model, sgd(model), strategy)
    names = [name for name, _ in model.named_parameters()]
    assert [names[i] for i in optimizer.param_groups[0]["excluded"]] == ["table.weight", "fc.bias"]


def test_a_pattern_for_parameters_that_are_not_in_the_optimizer():
    fleet.init()
    model = net()
    no_biases = torch.optim.SGD([p for n, p in model.named_parameters() if "bias" not in n], lr=0.1, momentum=0.9)
    with pytest.raises(StrategyError, match="not in the optimizer"):
        fleet.distribute(model, no_biases, fleet.DistributedStrategy(lars={"exclude_from_weight_decay": ["bias"]}))
