"""What models do besides calling one module after the other."""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from fleetx import StrategyError, UsageError, fleet
from fleetx.measure.fake_step import Step
from fleetx.parts.recompute import budget
from training import assert_equal, sgd, weights

WIDTH = 32


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.2)
        self.setup()

    def setup(self):
        pass


class Plainly(nn.Module):
    """The statistics of a batch norm without its counter of batches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x):
        return functional.batch_norm(x, self.mean, self.var, training=True)


class Statistics(Base):
    def setup(self):
        self.norm = Plainly()

    def forward(self, x):
        return self.c(self.norm(self.b(torch.relu(self.a(x)))))


class Backbone(Base):
    """A part of it is frozen, and called without gradients."""

    def setup(self):
        self.frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            x = self.frozen(x)
        return self.c(torch.tanh(self.b(torch.relu(self.drop(self.a(x))))))


class Loose(Base):
    """A tensor that is no buffer, one that a forward leaves behind, and a hook of the user's."""

    def setup(self):
        self.scale, self.left, self.seen = torch.full((WIDTH,), 0.5), None, []
        self.b.register_forward_hook(lambda m, args, out: self.seen.append(type(out)))

    def forward(self, x):
        h = torch.relu(self.a(x)) * self.scale
        self.left = h.mean()
        return self.c(self.drop(self.b(h)))


class Recurrent(Base):
    def setup(self):
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.c(self.lstm(self.a(x).view(-1, 4, WIDTH))[0].reshape(-1, WIDTH))


class Twice(Base):
    """Gives a module the same tensor two times."""

    class Sum(nn.Module):
        def forward(self, x, y):
            return torch.relu(x) + y.sigmoid()

    def setup(self):
        self.sum = Twice.Sum()

    def forward(self, x):
        h = self.a(x)
        return self.c(self.sum(h, y=h))


ODD = [Statistics, Backbone, Loose, Recurrent, Twice]


def train(make, declared, optimizer=sgd, steps=3):
    fleet.init()
    model = make()
    model, optimizer = fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))
    torch.manual_seed(4)
    for _ in range(steps):
        model(torch.randn(64, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize(
    "settings", [{"checkpoints": ["a", "b"]}, {"checkpoints": ["c"]}, {"memory_budget": "min"}], ids=str
)
def test_odd_models_train_the_same(make, settings):
    assert_equal(train(make, {"recompute": settings}), train(make, {}))


def test_hooks_of_the_user_see_training_only():
    fleet.init()
    model = Loose()
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(recompute={"memory_budget": "min"}))
    state = random.getstate()
    model(torch.randn(64, WIDTH)).sum()
    assert set(model.seen) == {torch.Tensor}
    assert len(model.seen) == 1
    assert random.getstate() == state


def test_a_recurrent_network_of_any_size_is_planned():
    class Larger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm = nn.Embedding(20, 32), nn.LSTM(32, 32, batch_first=True)
            self.head = nn.Linear(32, 4)

        def forward(self, ids):
            return self.head(self.lstm(self.embed(ids))[0])

    model = Larger()
    ids = torch.randint(0, 20, (256, 8))
    assert budget.choose(Step(model, sgd(model), (ids,)), "min").peak > 0


def test_inputs_that_other_modules_made():
    fleet.init()
    before, model = nn.Linear(WIDTH, WIDTH), Statistics()
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(recompute={"memory_budget": "min"}))
    model(before(torch.randn(64, WIDTH))).sum().backward()
    assert before.weight.grad is not None


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4))])
def test_a_model_with_nothing_to_cut_is_left_as_it_is(make):
    model = make()
    choice = budget.choose(Step(model, sgd(model), (torch.randn(2, 4),)), "min")
    assert choice.peak <= choice.plain


def deep():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(16)])


def test_min_is_the_least_that_any_budget_finds():
    model = deep()
    planner = budget.Planner(Step(model, torch.optim.AdamW(model.parameters()), (torch.randn(256, 32),)))
    least = planner.choose("min").peak
    for share in range(1, 10):
        assert planner.choose(f"{least + (planner.plain.peak - least) * share // 10}B").peak >= least
    with pytest.raises(StrategyError, match="cannot be met"):
        planner.choose(f"{least - 1}B")


def custom(model):
    class Strange(torch.optim.SGD):
        def __init__(self, alpha, params):
            super().__init__(params, lr=alpha, momentum=0.9)

    return Strange(0.1, model.parameters())


OPTIMIZERS = {
    "custom": custom,
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=True),
    "groups": lambda m: torch.optim.SGD([{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(m.parameters())]),
    "tensor rate": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(1e-3), foreach=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer(optimizer):
    make = OPTIMIZERS[optimizer]
    assert_equal(train(deep, {"recompute": {"memory_budget": "min"}}, make), train(deep, {}, make))


@pytest.mark.parametrize("others", [{"lars": True}, {"lamb": True}, {"clip": {"clip_norm": 0.1}}], ids=str)
def test_with_the_strategies_that_update(others):
    optimizer = (lambda m: torch.optim.Adam(m.parameters(), lr=1e-3)) if "lamb" in others else sgd
    found = train(deep, others | {"recompute": {"memory_budget": "min"}}, optimizer)
    assert_equal(found, train(deep, others, optimizer))


def test_a_way_that_depends_on_data_cannot_be_predicted():
    class Choosing(Base):
        def forward(self, x):
            return self.b(x) if x.sum() > 0 else self.a(x)

    with pytest.raises(StrategyError, match=r"cannot be run on tensors without data.*Name checkpoints instead"):
        train(Choosing, {"recompute": {"memory_budget": "min"}})


def test_parameters_that_change_between_forward_and_backward_are_an_error_as_in_plain_torch():
    fleet.init()
    model = deep()
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(recompute={"checkpoints": ["*"]}))
    loss = model(torch.randn(8, 32)).sum()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(UsageError, match="changed in place between forward and backward"):
        loss.backward()


def test_arguments_that_share_memory_and_are_written_to():
    class Writes(nn.Module):
        def forward(self, x, y):
            return x.mul_(2) + y

    class Sharing(Base):
        def setup(self):
            self.writes = Writes()

        def forward(self, x):
            h = self.a(x) * 1
            return self.c(self.writes(h.view(-1, WIDTH), h))

    with pytest.raises(UsageError, match="'writes' writes in place to one of several arguments that share memory"):
        train(Sharing, {"recompute": {"checkpoints": ["c"]}})


class Modes(nn.Module):
    """Keeps much in training, and little otherwise."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)) for _ in range(8)])

    def forward(self, x, times=1):
        for _ in range(times):
            x = self.layers(x)
        return x


def test_a_plan_is_for_the_mode_the_frozen_parameters_and_the_other_arguments():
    fleet.init()
    model = Modes()
    strategy = fleet.DistributedStrategy(recompute={"memory_budget": "min"})
    model, _ = fleet.distribute(model, sgd(model), strategy)
    plans = fleet._engine(model).notes["Recompute"]
    x = torch.randn(64, 32)
    for number, change in enumerate([
        lambda: model.eval()(x), lambda: model.train()(x), lambda: model(x, times=2), lambda: model(x, times=1),
        lambda: (model.layers[0].requires_grad_(False), model(x)),
    ]):  # fmt: skip
        change()
        assert len(plans["plans"]) == number + 1


def test_what_was_stored_for_another_forward_or_optimizer_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEETX_CACHE", str(tmp_path))

    class First(Base):
        def forward(self, x):
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    class Second(Base):
        def forward(self, x):
            return self.a(torch.tanh(self.b(torch.tanh(self.c(x)))))

    Second.__qualname__ = First.__qualname__
    settings = {"recompute": {"memory_budget": "min"}}
    train(First, settings)
    assert_equal(train(Second, settings), train(Second, {}))
    before = len(list((tmp_path / "recompute").iterdir()))
    train(Second, settings, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    assert len(list((tmp_path / "recompute").iterdir())) == before + 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"memory": "lots"}, "memory: 'lots' is not a number of bytes"),
        ({"memory": 0.5}, "memory: 0.5 is not a number of bytes"),
        ({"memory": "1MiB", "global_batch": 0}, "must be at least 1"),
        ({"memory": "1MiB", "ranks": -1}, "must be at least 1"),
        ({"memory": "1MiB", "loss_fn": functional.mse_loss}, "the sample must be a pair"),
    ],
)
def test_what_largest_batch_cannot_take(asked, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        fleet.largest_batch(Statistics(), torch.randn(4, WIDTH), trial=False, **asked)


def test_largest_batch_with_batch_norm_an_unknown_name_and_what_has_no_batch():
    class Scaled(Statistics):
        def forward(self, x, scale):
            return super().forward(x) * scale

    sample = {"x": torch.randn(4, WIDTH), "scale": torch.ones(WIDTH)}
    found = fleet.largest_batch(Scaled(), sample, memory="300KiB")
    assert found.micro > 1
    assert found.tried <= 300 * 1024
    strategy = fleet.DistributedStrategy(recompute={"checkpoints": ["nope"]})
    with pytest.raises(StrategyError, match="no module 'nope'"):
        fleet.largest_batch(Scaled(), sample, memory="1MiB", strategy=strategy)
    with pytest.raises(UsageError, match="at least one sample"):
        fleet.largest_batch(Scaled(), torch.randn(0, WIDTH), memory="1MiB")
