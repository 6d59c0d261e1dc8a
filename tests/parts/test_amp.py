"""bf16 equals autocast, fp16 equals GradScaler, bit for bit; an overflow on one rank skips the update on all."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import StrategyError, fleet
from training import adamw, assert_equal, batches, net, sgd, train_fleet, weights, zero_last

LIKE_GRADSCALER = {"init_loss_scaling": 2.0**16, "decr_ratio": 0.5, "decr_every_n_nan_or_inf": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_a_scale_it_is_plain_autocast_bit_for_bit(dtype):
    settings = {"dtype": str(dtype).removeprefix("torch.")}
    if dtype is torch.float16:
        settings |= {"use_dynamic_loss_scaling": False, "init_loss_scaling": 1.0}
    assert_equal(train_fleet(batches(), {"amp": settings}), _autocast(batches(), dtype))


def _autocast(data, dtype):
    model = net()
    optimizer = sgd(model)
    for x, y in data:
        with torch.autocast("cpu", dtype):
            out = model(x)
        mse_loss(out.float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize(("optimizer", "growth"), [(sgd, 2), (adamw, 1000)])
def test_fp16_equals_gradscaler_bit_for_bit_through_overflows(optimizer, growth):
    data = batches(12)
    data[3] = (data[3][0] * 1e30, data[3][1])
    data[7] = (data[7][0] * float("nan"), data[7][1])
    strategy = {"amp": LIKE_GRADSCALER | {"incr_every_n_steps": growth}}
    assert_equal(train_fleet(data, strategy, optimizer=optimizer), _gradscaler(data, optimizer, growth))


def _gradscaler(data, optimizer, growth):
    model = net()
    o = optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=growth)
    for x, y in data:
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        scaler.scale(mse_loss(out.float(), y)).backward()
        scaler.step(o)
        scaler.update()
        o.zero_grad()
    return weights(model)


def test_an_overflow_leaves_parameters_and_optimizer_state_unchanged():
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, adamw(model), fleet.DistributedStrategy(amp=LIKE_GRADSCALER))
    before = weights(model)
    x, y = batches(1)[0]
    zero_last(model, optimizer, x * float("inf"), y)
    assert not fleet.updated
    assert not optimizer.state
    assert_equal(weights(model), before)
    assert optimizer.state_dict()["fleetx"]["parts"]["AMP"]["scale"] == 2.0**15


def test_the_scale_follows_paddles_rule():
    """Two overflows in a row shrink it by 0.8; a good step in between resets the count; never below one."""
    fleet.init()
    model = net()
    strategy = fleet.DistributedStrategy(amp={"init_loss_scaling": 4.0, "incr_every_n_steps": 3})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    x, y = batches(1)[0]
    scales = []
    for good in [0, 1, 0, 0, 1, 1, 1, *[0] * 20]:
        zero_last(model, optimizer, x if good else x * float("inf"), y)
        scales.append(round(optimizer.state_dict()["fleetx"]["parts"]["AMP"]["scale"], 4))
    assert scales[:9] == [4, 4, 4, 3.2, 3.2, 3.2, 6.4, 6.4, 5.12]
    assert scales[-1] == 1.0


def test_an_overflow_on_one_rank_skips_the_update_on_all(ranks):
    found = ranks.run(_overflow_on_one)
    assert [f["updated"] for f in found] == [[True, False, True, True]] * 2
    assert_equal(found[0]["weights"], found[1]["weights"])
    assert found[0]["scale"] == found[1]["scale"] == 2.0**15


def _overflow_on_one():
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(amp=LIKE_GRADSCALER))
    updated = []
    for i, (x, y) in enumerate(batches(4)):
        bad = fleet.worker_index() == i == 1
        zero_last(model, optimizer, x * (float("inf") if bad else 1.0), y)
        updated.append(fleet.updated)
    scale = optimizer.state_dict()["fleetx"]["parts"]["AMP"]["scale"]
    return {"updated": updated, "weights": weights(model), "scale": scale}


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    note: str = ""


class ReturnsLossAndLogits(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.kind = net(), kind

    def forward(self, x, y):
        logits = self.body(x).float()
        loss = mse_loss(logits, y)
        return self.kind(loss=loss, logits=logits)


@pytest.mark.parametrize("kind", [dict, Output])
def test_a_model_that_returns_its_loss_and_its_logits_is_scaled_once(kind):
    data = batches()
    fleet.init()
    torch.manual_seed(0)
    model = ReturnsLossAndLogits(kind)
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(amp=LIKE_GRADSCALER))
    for x, y in data:
        out = model(x, y)
        assert isinstance(out, kind)
        loss = out["loss"] if kind is dict else out.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(weights(model.body), _gradscaler(data, sgd, 1000))


def test_fleet_backward_scales_a_loss_that_uses_parameters_directly():
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(amp=LIKE_GRADSCALER))
    plain = net()
    o = sgd(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for x, y in batches():
        fleet.backward(mse_loss(model(x), y) + 0.1 * sum(p.square().sum() for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = plain(x)
        loss = mse_loss(out.float(), y) + 0.1 * sum(p.square().sum() for p in plain.parameters())
        scaler.scale(loss).backward()
        scaler.step(o)
        scaler.update()
        o.zero_grad()
    assert_equal(weights(model), weights(plain))


# --- the custom lists -----------------------------------------------------------------------------
class Probe(nn.Module):
    """Records the dtype of each operation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.seen = {}

    def forward(self, x):
        for name in ("first", "second", "norm"):
            x = getattr(self, name)(x)
            self.seen[name] = x.dtype
        x = torch.softmax(x, -1)
        self.seen["softmax"] = x.dtype
        x = x.exp() @ torch.ones(6, 6)
        self.seen["matmul"] = x.dtype
        return x


def _seen(settings, recompute=()):
    fleet.init()
    model = Probe()
    declared = {"amp": {"dtype": "bfloat16"} | settings}
    if recompute:
        declared["recompute"] = {"checkpoints": list(recompute)}
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    out = model(torch.randn(4, 6))
    assert out.dtype is torch.float32
    out.sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    return model.seen


HALF, FULL = torch.bfloat16, torch.float32


def test_operations_in_the_black_list_run_in_float32():
    assert _seen({}) == {"first": HALF, "second": HALF, "norm": HALF, "softmax": HALF, "matmul": HALF}
    seen = _seen({"custom_black_list": ["linear", "softmax"]})
    assert seen["first"] is seen["second"] is seen["softmax"] is FULL
    assert seen["matmul"] is HALF


def test_operations_in_the_white_list_run_in_half_precision():
    black = {"custom_black_list": ["first", "second", "norm"]}
    assert _seen(black)["softmax"] is FULL
    assert _seen(black | {"custom_white_list": ["softmax"]})["softmax"] is HALF


def test_paddles_names_of_operations_work():
    assert _seen({"custom_black_list": ["elementwise_add", "matmul_v2"]})["matmul"] is FULL


def test_modules_in_the_lists_run_in_the_requested_precision():
    seen = _seen({"custom_black_list": ["second"], "custom_white_list": ["norm"]})
    assert seen["first"] is HALF
    assert seen["second"] is FULL
    assert seen["norm"] is HALF


def test_the_lists_apply_when_recompute_reruns_a_segment():
    """A second pass in another precision would raise an error in backward."""
    lists = {"custom_black_list": ["second", "softmax"], "custom_white_list": ["norm"]}
    for names in (["first", "norm"], ["second"]):
        assert _seen(lists, recompute=names) == _seen(lists)


def test_the_lists_do_not_affect_other_models():
    _seen({"custom_black_list": ["linear"]})
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(6, 6)(torch.randn(2, 6)).dtype is HALF


def test_a_name_that_is_neither_module_nor_operation_is_an_error():
    fleet.init()
    model = Probe()
    strategy = fleet.DistributedStrategy(amp={"custom_black_list": ["softmx"]})
    with pytest.raises(StrategyError, match=r"custom_black_list.*'softmx' is neither a module.*did you mean .*softmax"):
        fleet.distribute(model, sgd(model), strategy)


# --- settings -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16", "init_loss_scaling": 8.0}, "init_loss_scaling has no effect with dtype='bfloat16'"),
        ({"use_dynamic_loss_scaling": False, "incr_ratio": 3.0}, "incr_ratio has no effect"),
        ({"custom_black_varnames": ["x"]}, "no variable names"),
        ({"use_pure_fp16": True}, "is not supported yet"),
        ({"custom_white_list": ["a"], "custom_black_list": ["a"]}, "'a' is in both custom_white_list and"),
    ],
)
def test_settings_without_effect_are_errors(settings, message):
    with pytest.raises(StrategyError, match=message):
        fleet.DistributedStrategy(amp=settings).plan()


def test_a_float16_model_is_an_error():
    fleet.init()
    model = net().half()
    with pytest.raises(StrategyError, match=r"do not call model.half\(\)"):
        fleet.distribute(model, sgd(model), fleet.DistributedStrategy(amp=True))


def test_a_hook_that_would_see_the_scaled_gradient_is_an_error():
    fleet.init()
    model = net()
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    with pytest.raises(StrategyError, match=r"function on parameter '0.weight' with the gradient times the loss scale"):
        fleet.distribute(model, sgd(model), fleet.DistributedStrategy(amp={"dtype": "float16"}))
    fleet.distribute(model, sgd(model), fleet.DistributedStrategy(amp={"dtype": "bfloat16"}))


def test_a_copy_of_the_model_keeps_its_own_weights():
    fleet.init()
    model = Probe()
    strategy = fleet.DistributedStrategy(amp={"dtype": "bfloat16", "custom_black_list": ["second"]})
    model, _ = fleet.distribute(model, sgd(model), strategy)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.second.weight)
    nn.init.zeros_(twin.second.bias)
    assert not torch.equal(model(torch.ones(1, 6)), twin(torch.ones(1, 6)))


def test_ordinary_operations_can_be_listed():
    names = ["tanh", "add", "sub", "div", "exp", "sum", "sqrt", "pow", "log", "einsum", "layer_norm"]
    assert _seen({"custom_black_list": names})["norm"] is FULL


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mul", "use 'linear' or 'multiply'"),
        ("add_", "changes its arguments"),
        ("batch_norm", "changes its arguments"),
        ("__class__", "nor an operation of torch"),
        ("name", "nor an operation of torch"),
    ],
)
def test_operations_that_cannot_be_listed_are_errors_with_a_reason(name, message):
    fleet.init()
    model = Probe()
    strategy = fleet.DistributedStrategy(amp={"custom_black_list": [name]})
    with pytest.raises(StrategyError, match=message):
        fleet.distribute(model, sgd(model), strategy)


class Named(nn.Module):
    """Has a module named like an operation."""

    def __init__(self):
        super().__init__()
        self.linear, self.other, self.seen = nn.Linear(6, 6), nn.Linear(6, 6), {}

    def forward(self, x):
        self.seen["linear"] = (y := self.linear(x)).dtype
        self.seen["other"] = (y := self.other(y)).dtype
        return y


def test_a_name_means_a_module_before_an_operation():
    fleet.init()
    model = Named()
    strategy = fleet.DistributedStrategy(amp={"dtype": "bfloat16", "custom_black_list": ["linear"]})
    model, _ = fleet.distribute(model, sgd(model), strategy)
    model(torch.randn(2, 6))
    assert model.seen == {"linear": FULL, "other": HALF}


def test_a_batchnorm_in_the_white_list_keeps_its_statistics():
    fleet.init()
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    twin = copy.deepcopy(model)
    strategy = fleet.DistributedStrategy(amp={"dtype": "bfloat16", "custom_white_list": ["1"]})
    model, _ = fleet.distribute(model, sgd(model), strategy)
    x = torch.randn(8, 6)
    model(x).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        twin(x)
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean)


def test_listed_operations_are_an_error_on_a_compiled_model():
    fleet.init()
    model = torch.compile(Probe(), backend="eager")
    with pytest.raises(StrategyError, match="do not affect the backward of a compiled model"):
        fleet.distribute(model, sgd(model), fleet.DistributedStrategy(amp={"custom_black_list": ["softmax"]}))
    fleet.distribute(model, sgd(model), fleet.DistributedStrategy(amp={"custom_black_list": ["second"]}))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_in_float64_is_refused_because_autocast_leaves_it_alone(dtype):
    fleet.init()
    model = net().double()
    with pytest.raises(StrategyError, match=r"amp has no effect on float64 parameters, .*: call model.float\(\)"):
        fleet.distribute(model, sgd(model), fleet.DistributedStrategy(amp={"dtype": dtype}))
