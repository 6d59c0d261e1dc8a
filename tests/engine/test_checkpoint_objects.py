"""What else a checkpoint takes in: schedulers, loaders, optimizers and modules of every kind, or a clear refusal."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from fleetx import UsageError, fleet
from fleetx.comm.session import current
from training import adam, adamw, assert_close, batches, net, sgd, train, weights, zero_last


def build(make=net, optimizer=adamw, steps=2):
    fleet.init()
    current().entries.clear()
    model = make()
    model, optimizer = fleet.distribute(model, optimizer(model))
    for x, y in batches(steps):
        zero_last(model, optimizer, x, y)
    return model, optimizer


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# --- optimizers -----------------------------------------------------------------------------------
@pytest.mark.parametrize(("saved", "here"), [(momentum, adamw), (adamw, momentum), (adamw, sgd)])
def test_the_state_of_another_optimizer_is_refused_and_nothing_changes(tmp_path, saved, here):
    build(optimizer=saved)
    fleet.save(tmp_path / "c")
    model, optimizer = build(optimizer=here, steps=3)
    before, rate = [p.clone() for p in model.parameters()], optimizer.param_groups[0]["lr"]
    names = type(saved(net())).__name__, type(optimizer).__name__
    expected = "the checkpoint is of {}, and this optimizer is {}" if names[0] != names[1] else "groups differ"
    with pytest.raises(UsageError, match=expected.format(*names)):
        fleet.load(tmp_path / "c")
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.param_groups[0]["lr"] == rate


@pytest.mark.parametrize(
    ("optimizer", "strategy"),
    [
        (momentum, {"lars": {"lars_coeff": None, "lars_weight_decay": 0.0}}),
        (momentum, {"lars": {"exclude_from_weight_decay": ["weight", "bias"]}}),
        (adam, {"lamb": {"exclude_from_weight_decay": ["weight", "bias"]}}),
        (adamw, {"lamb": {"exclude_from_weight_decay": ["weight", "bias"], "lamb_weight_decay": 0.0}}),
        (adamw, {"muon": {"adamw": ["weight", "bias"]}}),
    ],
)
def test_a_strategy_that_extends_the_optimizer_continues_its_run(tmp_path, optimizer, strategy):
    """At settings with which the strategy does what the plain optimizer does."""

    def undecayed(model):
        made = optimizer(model)
        if "lamb" in strategy:
            made.param_groups[0]["weight_decay"] = 0.0
        return made

    data = batches(6)
    plain = train(data, optimizer=undecayed)
    build(optimizer=undecayed, steps=3)
    fleet.save(tmp_path / "c")
    model = net()
    model, adopted = fleet.distribute(model, undecayed(model), fleet.DistributedStrategy(**strategy))
    fleet.load(tmp_path / "c", model=model)
    for x, y in data[3:]:
        zero_last(model, adopted, x, y)
    assert_close(weights(model), plain)


@pytest.mark.parametrize(
    ("saved", "strategy", "message"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9, dampening=0.5), {}, "used dampening, which Lars does not"),
        (momentum, {"dgc": {"allow_single": True}}, "of SGD with strategy.dgc, and this optimizer is SGD with str"),
        (
            adam,
            {},
            "the checkpoint is of Adam, and this optimizer is SGD with strategy.lars: resume with the optimizer",
        ),
    ],
)
def test_another_optimizer_is_named_as_the_user_built_it(tmp_path, saved, strategy, message):
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, saved(model), fleet.DistributedStrategy(**strategy))
    zero_last(model, optimizer, *batches(1)[0])
    fleet.save(tmp_path / "c", model=model)
    model = net()
    fleet.distribute(model, momentum(model), fleet.DistributedStrategy(lars=True))
    with pytest.raises(UsageError, match=message):
        fleet.load(tmp_path / "c", model=model)


class OddKeys(torch.optim.SGD):
    """Numbers and any words are keys of its state."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            for number, key in enumerate((0, 1, "a.b", "c#number", "$d", "", "plain")):
                self.state[p][key] = torch.full_like(p, number)
            self.state[p]["e.f"] = 3
            self.state[p][-7] = None


def odd_keys(model):
    return OddKeys(model.parameters(), lr=0.1)


def test_any_key_of_the_state_of_a_parameter_comes_back(tmp_path):
    _, optimizer = build(optimizer=odd_keys)
    fleet.save(tmp_path / "c")
    wanted = [dict(state) for state in optimizer.state.values()]
    _, again = build(optimizer=odd_keys, steps=0)
    fleet.load(tmp_path / "c")
    for found, state in zip(again.state.values(), wanted, strict=True):
        assert found.keys() == state.keys()
        torch.testing.assert_close(found, state, rtol=0, atol=0)


class Shared(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure=None):
        self.state["all"] = {"n": torch.tensor(3.0)}
        super().step(closure)


class TupleKeys(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p][(1, 2)] = torch.zeros(1)
        super().step(closure)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Shared, "under 'all', which is not a parameter"), (TupleKeys, r"under \(1, 2\) per parameter")],
)
def test_state_that_would_be_lost_is_refused(tmp_path, kind, message):
    build(optimizer=lambda model: kind(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=message):
        fleet.save(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


# --- modules --------------------------------------------------------------------------------------
class Counting(nn.Linear):
    """Keeps more than tensors."""

    seen = 0
    scale = torch.zeros(2)

    def get_extra_state(self):
        return {"seen": self.seen, "scale": self.scale}

    def set_extra_state(self, state):
        self.seen, self.scale = state["seen"], state["scale"]


def counting():
    return nn.Sequential(Counting(6, 3), nn.Tanh(), Counting(3, 3))


def save_counting(folder):
    model, _ = build(counting)
    model[2].seen, model[2].scale = 5, torch.tensor([1.5, fleet.worker_index()])
    fleet.save(folder)


def load_counting(folder):
    model, _ = build(counting)
    fleet.load(folder)
    return [(module.seen, module.scale.tolist()) for module in (model[0], model[2])]


def test_what_modules_keep_besides_tensors_comes_back(ranks, tmp_path):
    ranks.run(save_counting, tmp_path / "c")
    assert ranks.run(load_counting, tmp_path / "c") == [[(0, [0, 0]), (5, [1.5, rank])] for rank in range(2)]
    assert load_counting(tmp_path / "c") == [(0, [0, 0]), (5, [1.5, 0])]
    build(lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 3)))
    with pytest.raises(UsageError, match="only the checkpoint has an extra state of '0'"):
        fleet.load(tmp_path / "c")


def test_an_extra_state_that_is_no_plain_data_is_refused(tmp_path):
    model, _ = build(counting)
    model[0].scale = object()
    with pytest.raises(UsageError, match=r"modules\['0'\]\['scale'\] is a object"):
        fleet.save(tmp_path / "c")


def expanded():
    model = net()
    model.register_buffer("wide", torch.arange(3.0)[:, None].expand(3, 4))
    return model


def test_a_buffer_whose_elements_share_memory_comes_back(tmp_path):
    model, _ = build(expanded)
    fleet.save(tmp_path / "c")
    model.wide[:, 0] = 7
    fleet.load(tmp_path / "c")
    assert torch.equal(model.wide, torch.arange(3.0)[:, None].expand(3, 4))
    assert model.wide.stride() == (1, 0)


# --- schedulers and loaders -----------------------------------------------------------------------
SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 3),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch_resumes(tmp_path, name):
    def move(scheduler):
        scheduler.step(*([1.0] if name == "plateau" else []))

    _, optimizer = build()
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.step(), move(scheduler)
    fleet.save(tmp_path / "c", scheduler=scheduler)
    _, other = build()
    again = SCHEDULERS[name](other)
    fleet.load(tmp_path / "c", scheduler=again)
    for _ in range(4):
        optimizer.step(), move(scheduler)
        other.step(), move(again)
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(("saved", "here"), [("step", "lambda"), ("step", "one cycle"), ("one cycle", "step")])
def test_the_state_of_another_scheduler_is_refused_and_the_model_stays(tmp_path, saved, here):
    _, optimizer = build()
    fleet.save(tmp_path / "c", scheduler=SCHEDULERS[saved](optimizer))
    model, optimizer = build(steps=3)
    before = [p.clone() for p in model.parameters()]
    scheduler = SCHEDULERS[here](optimizer)
    with pytest.raises(UsageError, match=f"scheduler .{type(scheduler).__name__}. cannot load its saved state"):
        fleet.load(tmp_path / "c", scheduler=scheduler)
    assert all(map(torch.equal, before, model.parameters()))


class Loader:
    """Any object with these two methods."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        if state == {"position": "lost"}:
            raise KeyError("position")
        self.state = state


PLAIN = [{1: 2}, {"a": [(1, 2)]}, float("inf"), 10**30, "\ud800", {"$tensor": "x"}, [], {"deep": [[[[1]]]]}]


@pytest.mark.parametrize("state", PLAIN, ids=ascii)
def test_a_loader_may_keep_any_plain_data(tmp_path, state):
    build()
    fleet.save(tmp_path / "c", loader=Loader(state))
    loader = Loader(None)
    fleet.load(tmp_path / "c", loader=loader)
    assert loader.state == state


@pytest.mark.parametrize(
    "state", [b"bytes", {1, 2}, object(), {"a": lambda: 0}], ids=["bytes", "set", "object", "function"]
)
def test_a_loader_that_keeps_something_else_is_refused(tmp_path, state):
    build()
    with pytest.raises(UsageError, match=r"loader.* is a .*, which a checkpoint cannot hold"):
        fleet.save(tmp_path / "c", loader=Loader(state))


def test_a_loader_whose_place_would_be_forgotten_is_named(tmp_path):
    build()
    fleet.save(tmp_path / "c", loader=Loader({"position": 3}))
    with pytest.warns(
        UserWarning, match="the checkpoint has the state of a loader, but yours starts from scratch: pass loader="
    ):
        fleet.load(tmp_path / "c")


def test_a_loader_that_refuses_is_named(tmp_path):
    build()
    fleet.save(tmp_path / "c", loader=Loader({"position": "lost"}))
    with pytest.raises(UsageError, match=r"loader .Loader. cannot load its saved state .KeyError: 'position'."):
        fleet.load(tmp_path / "c", loader=Loader(None))


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


itself = {}
itself["a"] = itself


@pytest.mark.parametrize(
    "extra", [{1: 2}, b"b", {"a": float("nan")}, object(), nested(90_000), nested(120), itself, {"a": {1, 2}}],
    ids=["int key", "bytes", "nan", "object", "very deep", "deep", "itself", "set"],
)  # fmt: skip
def test_an_extra_that_would_not_come_back_is_refused_when_it_is_saved(tmp_path, extra):
    build()
    with pytest.raises(UsageError, match=r"^extra"):
        fleet.save(tmp_path / "c", extra=extra)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, 1.5, True, "7", 2**60, None, torch.tensor(3)], ids=str)
def test_a_step_that_is_no_count_is_refused(tmp_path, step):
    build()
    with pytest.raises(UsageError, match="step = "):
        fleet.save(tmp_path / "c", step=step)
