"""The engine keeps the user's objects the user's: their types, their hooks, their state, their loop."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import StrategyError, UsageError, fleet
from training import (
    Lazy,
    adamw,
    assert_close,
    assert_equal,
    batches,
    big,
    net,
    sgd,
    train,
    train_fleet,
    weights,
    zero_last,
)

MERGE = {"gradient_merge": {"k_steps": 2}}


def armed(declared=None, *, make=net, optimizer=sgd):
    fleet.init()
    model = make()
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**(declared or {})))


def test_with_no_strategy_it_is_plain_pytorch_bit_for_bit():
    assert_equal(train_fleet(batches(), {}), train(batches()))


def test_the_model_and_the_optimizer_stay_the_users_own_objects():
    fleet.init()
    model = net()
    optimizer = sgd(model)
    names = list(model.state_dict())
    returned = fleet.distribute(model, optimizer, fleet.DistributedStrategy(amp={"dtype": "bfloat16"}, **MERGE))
    assert returned == (model, optimizer)
    assert type(model) is nn.Sequential
    assert type(optimizer) is torch.optim.SGD
    assert list(model.state_dict()) == names


# --- optimizers and schedulers --------------------------------------------------------------------
OPTIMIZERS = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.Adafactor,
]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda k: k.__name__)
def test_a_withheld_step_changes_nothing_in_any_optimizer(kind):
    """Merged batches equal the big batch, in parameters and in the optimizer's own state."""
    make = lambda model: kind(model.parameters(), lr=0.01)  # noqa: E731
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, make(model), fleet.DistributedStrategy(**MERGE))
    for x, y in batches():
        zero_last(model, optimizer, x, y)
    other = net()
    plain = make(other)
    for x, y in big(batches(), 2):
        zero_last(other, plain, x, y)
    assert_close(weights(model), weights(other))
    torch.testing.assert_close(optimizer.state_dict()["state"], plain.state_dict()["state"], rtol=1e-4, atol=1e-6)


def test_lbfgs_is_refused_because_it_moves_parameters_without_a_gradient():
    with pytest.raises(StrategyError, match="LBFGS"):
        armed(optimizer=lambda m: torch.optim.LBFGS(m.parameters()))


@pytest.mark.parametrize(
    "settings", [{}, {"clip": True}, {"gradient_merge": {"k_steps": 1}}], ids=lambda s: "+".join(s)
)
def test_a_step_with_a_closure_is_an_update(settings):
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**settings))
    x, y = batches(1)[0]

    def closure():
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert fleet.updated
    optimizer.zero_grad()
    optimizer.step()
    assert not fleet.updated


def test_a_closure_is_run_once_and_its_loss_returned():
    def loop(model, optimizer, x, y):
        def closure():
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0

    assert_close(train_fleet(batches(), MERGE, loop=loop), train(big(batches(), 2)))


def test_schedulers_read_and_write_the_rate_that_is_used():
    model, optimizer = armed(MERGE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=4)
    other = net()
    plain = sgd(other)
    plain_scheduler = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.5, total_steps=4)
    for x, y in batches():
        zero_last(model, optimizer, x, y)
        if fleet.updated:
            scheduler.step()
    for x, y in big(batches(), 2):
        zero_last(other, plain, x, y)
        plain_scheduler.step()
    assert scheduler.get_last_lr() == plain_scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    assert_close(weights(model), weights(other))


def test_parameter_groups_keep_their_own_settings():
    def groups(model):
        first = {"params": model[0].parameters(), "lr": 0.01}
        return torch.optim.SGD([first, {"params": [*model[2].parameters(), *model[4].parameters()]}], lr=0.2)

    assert_close(train_fleet(batches(), MERGE, optimizer=groups), train(big(batches(), 2), optimizer=groups))


def frozen():
    model = net()
    model[0].requires_grad_(False)
    return model


def test_frozen_parameters_stay_frozen_on_one_rank_and_on_two(ranks):
    want = train(batches(), make=frozen, optimizer=adamw)
    assert_close(train_fleet(batches(), {}, make=frozen, optimizer=adamw), want)
    assert torch.equal(want["0.weight"], net()[0].weight)
    found = ranks.run(_train_frozen)
    assert_close(found[0], want)


def _train_frozen():
    return train_fleet(batches(), {}, make=frozen, optimizer=adamw)


def test_the_state_of_the_optimizer_makes_the_round_trip_through_a_file():
    strategy = {"amp": {"dtype": "float16"}, **MERGE}
    model, optimizer = armed(strategy, optimizer=adamw)
    data = batches(9)
    for x, y in data[:5]:
        zero_last(model, optimizer, x, y)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, optimizer2 = armed(strategy, optimizer=adamw)
    again.load_state_dict(saved["model"])
    optimizer2.load_state_dict(saved["optimizer"])
    for x, y in data[5:]:
        zero_last(model, optimizer, x, y)
        zero_last(again, optimizer2, x, y)
    assert_equal(weights(model), weights(again))
    for a, b in zip(optimizer.state.values(), optimizer2.state.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_plain_checkpoint_loads_and_a_fleetx_checkpoint_loads_into_plain_pytorch():
    model, optimizer = armed(MERGE)
    other = net()
    plain = sgd(other)
    for x, y in batches(3):
        zero_last(model, optimizer, x, y)
        zero_last(other, plain, x, y)
    plain.load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match="has no fleetx state: strategies start from the beginning"):
        optimizer.load_state_dict(plain.state_dict())
    assert optimizer.state_dict()["fleetx"]["merged"] == 0


def test_a_checkpoint_of_another_model_or_of_the_future_is_refused():
    _, optimizer = armed(MERGE)
    saved = optimizer.state_dict()
    saved["fleetx"]["withheld"] = {"nowhere.weight": torch.zeros(1)}
    with pytest.raises(
        UsageError, match=r"a gradient of 'nowhere.weight' \(1,\), which does not match the model: build"
    ):
        optimizer.load_state_dict(saved)
    saved["fleetx"]["version"] = 99
    with pytest.raises(UsageError, match="newer fleetx"):
        optimizer.load_state_dict(saved)


def test_a_checkpoint_taken_inside_of_a_merge_serves_only_the_rank_that_took_it(ranks):
    """Rank 0's unreduced gradients in the place of rank 1's would be silently wrong; after a flush there are none."""
    saved = ranks.run(_save_inside_of_a_merge)
    assert ranks.run(_load_on_both, saved[0]) == [
        "",
        "this checkpoint was saved inside a merge window by rank 0 of 2, whose gradients only that rank can use, but "
        "this is rank 1 of 2. Save one checkpoint per rank, or call fleet.flush() before saving",
    ]


def _save_inside_of_a_merge():
    model, optimizer = armed(MERGE)
    zero_last(model, optimizer, *batches(1)[0])
    return optimizer.state_dict()


def _load_on_both(saved):
    _, optimizer = armed(MERGE)
    try:
        optimizer.load_state_dict(saved)
    except UsageError as error:
        return str(error)
    return ""


def test_loading_the_state_of_a_part_that_is_off_warns():
    _, optimizer = armed({"amp": {"dtype": "float16"}})
    saved = copy.deepcopy(optimizer.state_dict())
    _, other = armed()
    with pytest.warns(
        UserWarning, match="the checkpoint has state of `amp` that this strategy does not use: it is ignored"
    ):
        other.load_state_dict(saved)


# --- models ---------------------------------------------------------------------------------------
class Wordy(nn.Module):
    """Takes keywords, returns a nested structure."""

    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, *, x, flag=True):
        out = self.body(x)
        return {"out": out, "more": [out * 2, ("text", None, 3)], "flag": flag}


def test_models_that_take_keywords_and_return_dicts_train(ranks):
    want = train(big(batches(), 2))
    model, optimizer = armed({"amp": {"dtype": "bfloat16"}, **MERGE}, make=Wordy)
    for x, y in batches():
        out = model(x=x)
        assert out["more"][1] == ("text", None, 3)
        assert out["out"].dtype is torch.float32
        mse_loss(out["out"], y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(model.body), want, rtol=0.05, atol=0.05)
    found = ranks.run(_train_wordy)
    assert_close(found[0], want)


def _train_wordy():
    from training import share

    model, optimizer = armed(MERGE, make=Wordy)
    for x, y in share(batches(), fleet.worker_index(), 2):
        mse_loss(model(x=x)["out"], y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model.body)


def test_several_forwards_before_one_backward_are_one_loss():
    def loop(model, optimizer, x, y):
        (mse_loss(model(x[:2]), y[:2]) / 2 + mse_loss(model(x[2:]), y[2:]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_close(train_fleet(batches(), MERGE, loop=loop), train(big(batches(), 2)))


def test_several_backwards_before_one_step_are_summed(ranks):
    found = ranks.run(_two_backwards)
    assert_equal(found[0], found[1])
    assert_close(found[0], train(batches()))


def _two_backwards():
    def loop(model, optimizer, x, y):
        half = len(x) // 2
        (mse_loss(model(x[:half]), y[:half]) / 2).backward()
        (mse_loss(model(x[half:]), y[half:]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train_fleet(batches(), {}, loop=loop)


def test_an_error_inside_of_the_forward_leaves_no_context_open():
    model, optimizer = armed({"amp": {"dtype": "bfloat16"}})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 99))
    assert not torch.is_autocast_enabled("cpu")
    zero_last(model, optimizer, *batches(1)[0])


def test_a_copy_or_a_pickle_of_the_model_is_plain():
    model, _ = armed({"amp": {"dtype": "bfloat16"}})
    x = torch.randn(2, 6)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), net()(x))
    assert not torch.equal(model(x), net()(x))


@pytest.mark.parametrize("declared", [{}, {"amp": {"dtype": "bfloat16"}}, MERGE], ids=["plain", "amp", "merge"])
def test_a_whole_model_loads_with_the_safe_globals_of_the_plain_one(tmp_path, declared):
    model, _ = armed(declared)
    torch.save(model, tmp_path / "model.pt")
    with torch.serialization.safe_globals({type(m) for m in net().modules()}):
        twin = torch.load(tmp_path / "model.pt", weights_only=True)
    x = torch.randn(2, 6)
    assert torch.equal(twin(x), net()(x))


@pytest.mark.slow
@pytest.mark.parametrize("declared", [{}, {**MERGE, "clip": True}], ids=["plain", "merge"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_models_train_the_same(when, declared):
    def build():
        model = net()
        return torch.compile(model, backend="aot_eager") if when == "before" else model

    model, optimizer = armed(declared, make=build)
    if when == "after":
        model = torch.compile(model, backend="aot_eager")
    for x, y in batches():
        zero_last(model, optimizer, x, y)
    found = {k.removeprefix("_orig_mod."): v for k, v in weights(model).items()}
    assert_close(found, train_fleet(batches(), declared))


def test_a_compiled_model_keeps_its_plain_names_in_the_checkpoint():
    model, optimizer = armed(MERGE, make=lambda: torch.compile(net(), backend="eager"))
    zero_last(model, optimizer, *batches(1)[0])
    assert sorted(optimizer.state_dict()["fleetx"]["withheld"]) == sorted(dict(net().named_parameters()))


@pytest.mark.slow
def test_compiled_models_train_on_two_ranks(ranks):
    found = ranks.run(_train_compiled)
    assert_equal(found[0], found[1])
    assert_close({k.removeprefix("_orig_mod."): v for k, v in found[0].items()}, train(batches()))


def _train_compiled():
    return train_fleet(batches(), {}, make=lambda: torch.compile(net(), backend="aot_eager"))


# --- what cannot be honoured ----------------------------------------------------------------------
def test_gradients_that_bypass_the_model_are_refused_where_they_would_be_wrong():
    model, optimizer = armed({"amp": {"dtype": "float16"}})
    mse_loss(model[4](model[2](model[0](torch.randn(4, 6)))), torch.randn(4, 3)).backward()
    with pytest.raises(UsageError, match="call the model itself"):
        optimizer.step()


def test_a_stranger_in_the_optimizer_is_refused():
    def with_stranger(model):
        return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7))], lr=0.1)

    with pytest.raises(StrategyError, match=r"1 parameters that are not in the model \(shapes \(7,\)\)"):
        armed(optimizer=with_stranger)


@pytest.mark.parametrize("declared", [{"amp": {"dtype": "float16"}}, MERGE], ids=["scaled", "summed"])
def test_clipping_by_hand_where_the_gradient_is_not_finished_is_refused(declared):
    model, optimizer = armed(declared)
    x, y = batches(1)[0]
    mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(UsageError, match=r"strategy.clip = True"):
        optimizer.step()


def test_clipping_by_hand_without_a_strategy_is_plain_pytorch():
    def loop(model, optimizer, x, y):
        mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()

    assert_equal(train_fleet(batches(), {}, loop=loop), train(batches(), loop=loop))


def test_taking_gradients_away_by_hand_freezes_for_a_step():
    def loop(model, optimizer, x, y):
        mse_loss(model(x), y).backward()
        model[4].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()

    found = train_fleet(batches(), {"amp": {"dtype": "float16"}}, loop=loop)
    assert torch.equal(found["4.weight"], net()[4].weight)
    assert not torch.equal(found["4.bias"], net()[4].bias)


def test_zero_grad_that_keeps_the_tensors_works_too(ranks):
    found = ranks.run(_keep_tensors)
    assert_equal(found[0], found[1])
    assert_close(found[0], train(big(batches(), 2)))


def _keep_tensors():
    def loop(model, optimizer, x, y):
        optimizer.zero_grad(set_to_none=False)
        mse_loss(model(x), y).backward()
        optimizer.step()

    return train_fleet(batches(), MERGE, loop=loop)


def test_an_unused_parameter_is_refused_before_the_step_that_would_part_the_ranks(ranks):
    for message in ranks.run(_train_lazy):
        assert "unused.weight, unused.bias got no gradient: set strategy.find_unused_parameters = True" in message


def _train_lazy():
    model, optimizer = armed(make=Lazy)
    before = weights(model)
    try:
        zero_last(model, optimizer, *batches(1)[0])
    except UsageError as error:
        assert_equal(weights(model), before)
        return str(error)
    return ""


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.table(ids))


@pytest.mark.parametrize("declared", [{"clip": True}, {"amp": True}, MERGE], ids=str)
def test_sparse_gradients_are_refused_where_they_cannot_be_taken(declared):
    with pytest.raises(StrategyError, match="with the sparse gradients of 'table' is not supported yet"):
        armed(declared, make=Sparse)


def test_sparse_gradients_are_reduced_between_ranks(ranks):
    found = ranks.run(_train_sparse)
    assert_equal(found[0], found[1])


def _train_sparse():
    fleet.init()
    model = Sparse()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fleet.distribute(model, optimizer)
    for i in range(4):
        model(torch.tensor([fleet.worker_index(), i])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)
