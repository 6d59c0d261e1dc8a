from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import UsageError, fleet
from fleetx.comm.session import current, reset
from fleetx.verify import oracle
from training import adam, assert_equal, batches, net, sgd, share, train, weights, with_fleet_backward

EMA = {"ema": {"decay": 0.8}}
FORMS = [{"decay": 0.8}, {"decay": 1.0, "power": 2.0}, {"decay": 0.5, "power": 0.0}]


def build(declared, *, make=net, optimizer=sgd):
    reset()
    fleet.init()
    model = make()
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))


def step(model, o, x, y, declared):
    if "pipeline" in declared:
        fleet.forward_backward(x, y, loss_fn=mse_loss, model=model)
        o.step()
        o.zero_grad()
    else:
        with_fleet_backward(model, o, x, y)


def whole(model):
    found = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in weights(model).items()}
    return {k: v for k, v in found.items() if not v.is_meta}


def averaged(model):
    with fleet.averaged(model=model):
        return whole(model)


def double():
    return net().double()


def shared(declared, data):
    return data if "pipeline" in declared else share(data, fleet.worker_index(), fleet.worker_num())


def train_averaged(declared, data):
    """The averaged parameters after training in float64."""
    model, o = build(declared, make=double)
    for x, y in shared(declared, data):
        step(model, o, x.double(), y.double(), declared)
    return averaged(model)


def expected(settings, data, replicas=1):
    full = {"ema": {"decay": 0.999, "power": None} | settings["ema"]} | {
        k: v for k, v in settings.items() if k != "ema"
    }
    found = oracle.train(net(), sgd, full, data, mse_loss, replicas)
    return {k.removeprefix(oracle.AVERAGED): v for k, v in found.items() if k.startswith(oracle.AVERAGED)}


def assert_exact(got, want):
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=1e-12)


# --- the formula ----------------------------------------------------------------------------------
@pytest.mark.parametrize("ema", FORMS, ids=str)
def test_the_average_is_the_formula_in_float64(ema):
    assert_exact(train_averaged({"ema": ema}, batches()), expected({"ema": ema}, batches()))


def test_power_0_is_the_mean_of_all_updates_and_power_2_weights_them_by_their_number():
    model, o = build({"ema": {"decay": 1.0, "power": 0.0}}, make=double)
    seen = []
    for x, y in batches():
        with_fleet_backward(model, o, x.double(), y.double())
        seen.append(weights(model))
    assert_exact(averaged(model), {k: torch.stack([s[k] for s in seen]).mean(0) for k in seen[0]})


def test_the_average_equals_that_of_torch():
    model, o = build({"ema": {"decay": 0.8}})
    theirs = torch.optim.swa_utils.AveragedModel(net(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
    theirs.n_averaged += 1  # it begins with the first parameters, as ours does
    for x, y in batches():
        with_fleet_backward(model, o, x, y)
        theirs.update_parameters(model)
    assert_equal(averaged(model), weights(theirs.module))


def test_training_is_the_same_bit_for_bit():
    model, o = build(EMA)
    for x, y in batches():
        with_fleet_backward(model, o, x, y)
        averaged(model)
    assert_equal(weights(model), train(batches()))


def test_half_precision_parameters_have_an_average_in_float32():
    model, o = build({"ema": {"decay": 0.999}}, make=lambda: net().bfloat16())
    for x, y in batches():
        with_fleet_backward(model, o, x.bfloat16(), y.bfloat16())
    kept = current().find(model).state["EMA"]["average"]
    before = {k: v.clone() for k, v in kept.items()}
    assert {t.dtype for t in kept.values()} == {torch.float32}
    assert averaged(model)["0.weight"].dtype is torch.bfloat16
    assert_equal(kept, before)


def test_parameters_that_join_the_optimizer_later_have_an_average_from_then_on():
    def frozen():
        model = net()
        model[0].requires_grad_(False)
        return model

    def of_the_rest(model):
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    model, o = build(EMA, make=frozen, optimizer=of_the_rest)
    x, y = batches()[0]
    with_fleet_backward(model, o, x, y)
    model[0].requires_grad_(True)
    o.add_param_group({"params": list(model[0].parameters())})
    start = weights(model)["0.weight"]
    with_fleet_backward(model, o, x, y)
    torch.testing.assert_close(averaged(model)["0.weight"], 0.8 * start + 0.2 * weights(model)["0.weight"])


def test_complex_parameters_are_averaged():
    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]))

        def forward(self, x):
            return (x * self.w).abs()

    model, o = build({"ema": {"decay": 0.5}}, make=Turn)
    start = weights(model)["w"]
    with_fleet_backward(model, o, torch.ones(2), torch.zeros(2))
    torch.testing.assert_close(averaged(model)["w"], (start + weights(model)["w"]) / 2)


# --- which updates count --------------------------------------------------------------------------
def test_merged_steps_count_once():
    data, declared = batches(), {**EMA, "gradient_merge": {"k_steps": 4}}
    settings = {**EMA, "gradient_merge": {"k_steps": 4, "avg": True}}
    assert_exact(train_averaged(declared, data), expected(settings, data))


def test_a_flush_counts_as_an_update():
    model, o = build({**EMA, "gradient_merge": {"k_steps": 4}})
    for x, y in batches(6):
        with_fleet_backward(model, o, x, y)
    fleet.flush()
    assert current().find(model).state["EMA"]["updates"] == 2


def test_an_update_that_is_skipped_does_not_count():
    model, o = build({**EMA, "amp": {"init_loss_scaling": 2.0**40}}, optimizer=adam)
    (x, y), *_ = batches()
    with_fleet_backward(model, o, x, y)
    assert not fleet.updated
    assert current().find(model).state["EMA"]["updates"] == 0
    assert_equal(averaged(model), weights(net()))


def test_a_gradient_that_is_not_finite_does_not_count():
    model, o = build(EMA)
    x, y = batches()[0]
    with_fleet_backward(model, o, x, y)
    before = averaged(model)
    with pytest.warns(UserWarning, match="not finite"):
        with_fleet_backward(model, o, x * float("nan"), y)
    assert_equal(averaged(model), before)


# --- the context ----------------------------------------------------------------------------------
def test_before_the_first_update_the_average_is_the_model():
    model, _ = build(EMA)
    assert_equal(averaged(model), weights(net()))


def spoil(model, x):
    with fleet.averaged():
        model(x)  # in training mode: changes the buffers
        model[1].running_mean = torch.full((3,), 7.0)
        raise ZeroDivisionError


def test_the_context_restores_parameters_and_buffers_whatever_the_body_does():
    def with_norm():
        return nn.Sequential(net(), nn.BatchNorm1d(3))

    model, o = build(EMA, make=with_norm)
    x, y = batches()[0]
    with_fleet_backward(model, o, x, y)
    before, addresses = weights(model), [t.data_ptr() for t in model.state_dict().values()]
    kept = {k: v.clone() for k, v in current().find(model).state["EMA"]["average"].items()}
    with pytest.raises(ZeroDivisionError):
        spoil(model, x)
    assert_equal(weights(model), before)
    assert addresses == [t.data_ptr() for t in model.state_dict().values()]
    assert_equal(current().find(model).state["EMA"]["average"], kept)


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda model, o, path: mse_loss(model(batches()[0][0]), batches()[0][1]).backward(),
        lambda model, o, path: o.step(),
        lambda model, o, path: o.state_dict(),
        lambda model, o, path: fleet.save(path / "saved"),
        lambda model, o, path: fleet.flush(),
        lambda model, o, path: fleet.release(),
        lambda model, o, path: o.load_state_dict(path),
        lambda model, o, path: fleet.averaged().__enter__(),
    ],
    ids=["backward", "step", "state_dict", "save", "flush", "release", "load", "averaged"],
)
def test_training_saving_and_loading_inside_the_context_raise_an_error(forbidden, tmp_path):
    model, o = build({**EMA, "gradient_merge": {"k_steps": 2}})
    state = o.state_dict()
    with fleet.averaged(), pytest.raises(UsageError, match=r"inside fleet\.averaged"):
        forbidden(model, o, state if forbidden.__code__.co_names == ("load_state_dict",) else tmp_path)


def test_without_the_strategy_there_is_no_average():
    build({})
    with pytest.raises(UsageError, match=r"turn strategy\.ema on"), fleet.averaged():
        pass


def test_a_decay_of_1_alone_is_an_error():
    with pytest.raises(ValueError, match="never moves the average: use a decay below 1"):
        fleet.DistributedStrategy(ema={"decay": 1.0}).plan()


# --- checkpoints and export -----------------------------------------------------------------------
def test_a_run_that_resumes_has_the_same_average_bit_for_bit(tmp_path):
    model, o = build({**EMA, "gradient_merge": {"k_steps": 3}}, optimizer=adam)
    for i, (x, y) in enumerate(batches(10)):
        with_fleet_backward(model, o, x, y)
        if i == 6:
            fleet.save(tmp_path / "saved")
    want = averaged(model), weights(model)
    again, o2 = build({**EMA, "gradient_merge": {"k_steps": 3}}, optimizer=adam)
    fleet.load(tmp_path / "saved")
    for x, y in batches(10)[7:]:
        with_fleet_backward(again, o2, x, y)
    assert_equal(averaged(again), want[0])
    assert_equal(weights(again), want[1])


def test_a_checkpoint_without_an_average_begins_one(tmp_path):
    model, o = build({})
    for x, y in batches(3):
        with_fleet_backward(model, o, x, y)
    plain = weights(model), o.state_dict()
    again, o2 = build(EMA)
    with_fleet_backward(again, o2, *batches()[0])
    again.load_state_dict(plain[0])
    o2.load_state_dict(plain[1])
    assert_equal(averaged(again), plain[0])


def test_the_average_can_be_exported(tmp_path):
    from safetensors.torch import load_file

    model, o = build(EMA)
    for x, y in batches(3):
        with_fleet_backward(model, o, x, y)
    fleet.export(tmp_path / "a", averaged=True)
    with fleet.averaged():
        fleet.export(tmp_path / "b")
    for name in "ab":
        assert_equal(load_file(tmp_path / name / "model.safetensors"), averaged(model))


# --- ranks ----------------------------------------------------------------------------------------
SPLITS = [
    {},
    {"sharding": {"stage": 2}},
    {"sharding": {"stage": 3}, "gradient_merge": {"k_steps": 2, "avg": True}},
    {"pipeline": {"micro_batch": 2, "stages": ["2"]}},
    {"localsgd": {"k_steps": 3}},
]
each_split = pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(split) or "data parallel")


@each_split
def test_ranks_equal_one_process(split, ranks):
    changes = {
        k: {"begin_step": 1, **v} if k == "localsgd" else v
        for k, v in split.items()
        if k in ("localsgd", "gradient_merge")
    }
    want = expected({**EMA, **changes}, batches(), replicas=2 if "localsgd" in split else 1)
    for got in ranks.run(train_averaged, {**EMA, **split}, batches()):
        assert got
        assert_exact(got, want)


def saves_and_resumes(split, folder):
    """Is everything the same after a resume, and a resume with the whole model on each rank?"""
    declared = {**EMA, **split}
    model, o = build(declared)
    data = shared(declared, batches(10))
    for i, (x, y) in enumerate(data):
        step(model, o, x, y, declared)
        with fleet.averaged():
            mse_loss(model(x), y) if "pipeline" not in declared else None
        if i == 5:
            fleet.save(folder)
            saved = averaged(model)
    want = averaged(model), whole(model)
    again, o2 = build(declared)
    fleet.load(folder)
    for x, y in data[6:]:
        step(again, o2, x, y, declared)
    same = all(
        torch.equal(got[k], w[k]) for got, w in zip((averaged(again), whole(again)), want, strict=True) for k in w
    )
    other, _ = build(EMA)
    if "localsgd" not in split:
        fleet.load(folder)
        now = averaged(other)
        same = same and all(torch.equal(now[k], v) for k, v in saved.items())
    return same


@pytest.mark.slow
@each_split
def test_a_resume_has_the_same_average_and_other_layouts_can_take_it_over(split, ranks, tmp_path):
    assert ranks.run(saves_and_resumes, split, tmp_path / "saved") == [True, True]


def local_ema_of_other_ranks(folder):
    model, o = build({**EMA, "localsgd": {"k_steps": 4}})
    for x, y in share(batches(6), fleet.worker_index(), 2):
        with_fleet_backward(model, o, x, y)
    fleet.save(folder)
    return averaged(model), current().find(model).state["EMA"]["average"]


def test_local_averages_become_one_on_another_number_of_ranks(ranks, tmp_path):
    (want, a), (also, b) = ranks.run(local_ema_of_other_ranks, tmp_path / "saved")
    assert not torch.equal(a["0.weight"], b["0.weight"])
    assert_equal(want, also)
    model, _ = build(EMA)
    with pytest.warns(UserWarning, match="it is ignored"):
        fleet.load(tmp_path / "saved")
    torch.testing.assert_close(averaged(model), want)


def outputs_match(split):
    """Do forwards inside the context, and after it, use the values that the parameters have there?"""
    declared = {**EMA, **split}
    model, o = build(declared)
    data = shared(declared, batches(4))
    x = batches()[0][0]

    def is_plain():
        plain = net()
        plain.load_state_dict(whole(model))
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))

    for some, target in data:
        step(model, o, some, target, declared)
        with fleet.averaged():
            is_plain()
        is_plain()
    return True


@pytest.mark.parametrize(
    "split", [s for s in SPLITS if "pipeline" not in s], ids=lambda split: "-".join(split) or "plain"
)
def test_a_forward_in_the_context_computes_with_the_average_and_after_it_with_the_parameters(split, ranks):
    assert ranks.run(outputs_match, split) == [True, True]


def one_rank_alone():
    model, o = build(EMA)
    for x, y in share(batches(3), fleet.worker_index(), 2):
        with_fleet_backward(model, o, x, y)
    if fleet.worker_index() == 0:
        with fleet.averaged(), torch.no_grad():
            model(batches()[0][0])
    for x, y in share(batches(3), fleet.worker_index(), 2):
        with_fleet_backward(model, o, x, y)
    return weights(model)


def test_one_rank_can_evaluate_the_average_alone(ranks):
    a, b = ranks.run(one_rank_alone)
    assert_equal(a, b)
