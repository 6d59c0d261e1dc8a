"""Models that do more than call one module after another."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from fleetx import StrategyError, UsageError, fleet
from fleetx.measure.fake_step import TrainingStep
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
    """Batch norm statistics without the counter of batches."""

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
    """A part of it is frozen and called under no_grad."""

    def setup(self):
        self.frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            x = self.frozen(x)
        return self.c(torch.tanh(self.b(torch.relu(self.drop(self.a(x))))))


class Loose(Base):
    """A tensor that is not a buffer, one that a forward leaves behind, and a hook of the user."""

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
    """Passes the same tensor twice to a module."""

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


def test_hooks_of_the_user_only_see_training():
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
    assert budget.choose(TrainingStep(model, sgd(model), (ids,)), "min").peak > 0


def test_inputs_that_another_module_computed():
    fleet.init()
    before, model = nn.Linear(WIDTH, WIDTH), Statistics()
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(recompute={"memory_budget": "min"}))
    model(before(torch.randn(64, WIDTH))).sum().backward()
    assert before.weight.grad is not None


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4))])
def test_a_model_that_cannot_be_cut(make):
    model = make()
    choice = budget.choose(TrainingStep(model, sgd(model), (torch.randn(2, 4),)), "min")
    assert choice.peak <= choice.plain


def deep():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)])


def test_no_budget_finds_less_than_min():
    model = deep()
    step = TrainingStep(model, torch.optim.AdamW(model.parameters()), (torch.randn(256, 32),))
    planner = budget.Planner(step, timed=False)
    least = planner.choose("min").peak
    for share in (0.1, 0.5, 0.9):
        assert planner.choose(f"{least + (planner.plain.peak - least) * share:.0f}B").peak >= least
    with pytest.raises(StrategyError, match="does not fit into"):
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


def test_a_forward_that_depends_on_data_cannot_be_predicted():
    class Choosing(Base):
        def forward(self, x):
            return self.b(x) if x.sum() > 0 else self.a(x)

    with pytest.raises(StrategyError, match=r"cannot run on tensors without data.*name checkpoints instead"):
        train(Choosing, {"recompute": {"memory_budget": "min"}})


def test_parameters_that_change_between_forward_and_backward_are_an_error_as_in_plain_torch():
    fleet.init()
    model = deep()
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(recompute={"checkpoints": ["*"]}))
    loss = model(torch.randn(8, 32)).sum()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(UsageError, match="modified in place between forward and backward"):
        loss.backward()


def test_arguments_that_share_memory_and_are_modified():
    class Writes(nn.Module):
        def forward(self, x, y):
            return x.mul_(2) + y

    class Sharing(Base):
        def setup(self):
            self.writes = Writes()

        def forward(self, x):
            h = self.a(x) * 1
            return self.c(self.writes(h.view(-1, WIDTH), h))

    with pytest.raises(UsageError, match="'writes' modifies an argument in place that shares memory"):
        train(Sharing, {"recompute": {"checkpoints": ["c"]}})


class Modes(nn.Module):
    """Saves much in training, and little otherwise."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)) for _ in range(3)])

    def forward(self, x, times=1):
        for _ in range(times):
            x = self.layers(x)
        return x


def test_a_plan_is_for_one_mode_one_set_of_frozen_parameters_and_one_set_of_constants():
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


def test_a_plan_stored_for_another_forward_or_optimizer_is_not_used(tmp_path, monkeypatch):
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
