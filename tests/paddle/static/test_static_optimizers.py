"""Optimizers and learning rates of Paddle scripts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from small_applications import batch, make
from static_models import losses, minimized, optimizer_of, started

from fleetx import StrategyError, UsageError, fleet
from fleetx.optim.schedule import linear_warmup_decay
from fleetx.paddle.api import fleet as paddle_fleet
from fleetx.paddle.api import fluid, nn, optimizer, regularizer
from fleetx.paddle.api.optimizer import lr

# Each with torch's own.
SAME = {
    "fluid SGD": (fluid.optimizer.SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "paddle SGD": (optimizer.SGD(0.1, weight_decay=0.01), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01)),
    "fluid Momentum": (
        fluid.optimizer.MomentumOptimizer(
            0.1, 0.9, use_nesterov=True, regularization=fluid.regularizer.L2DecayRegularizer(0.01)
        ),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "paddle Momentum": (
        optimizer.Momentum(0.1, weight_decay=regularizer.L2Decay(0.01)),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "fluid Adam": (fluid.optimizer.Adam(0.01, beta1=0.8), lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.999))),
    "paddle Adam": (
        optimizer.Adam(0.01, epsilon=1e-4, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, weight_decay=0.1),
    ),
    "paddle AdamW": (optimizer.AdamW(0.01), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.01)),
    "fluid AdamW": (
        fluid.optimizer.AdamW(0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
}


def plainly(make_optimizer, steps=3):
    model = make("resnet")
    update = make_optimizer(model.parameters())
    found = []
    for step in range(steps):
        loss = model(**batch("resnet", seed=step)).loss
        loss.backward()
        update.step()
        update.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", SAME)
def test_each_trains_as_torchs_own(name):
    described, plain = SAME[name]
    assert losses(*started(described=described), "resnet", steps=3) == plainly(plain)


@pytest.mark.parametrize("house", [fluid.optimizer, optimizer])
def test_lars_of_ones_own_is_momentum_under_the_strategy(house):
    excluded = ["batch_norm", ".b_0"]
    own = house.LarsMomentum(0.1, 0.9, lars_weight_decay=0.01, exclude_from_weight_decay=excluded)
    declared = {"lars": {"lars_weight_decay": 0.01, "exclude_from_weight_decay": excluded}}
    by_strategy = losses(*started(described=optimizer.Momentum(0.1), declared=declared), "resnet")
    assert losses(*started(described=own), "resnet") == by_strategy


@pytest.mark.parametrize("house", [fluid.optimizer, optimizer])
def test_lamb_of_ones_own_is_adam_under_the_strategy(house):
    own = house.Lamb(0.01, exclude_from_weight_decay_fn=lambda p: "batch_norm" in p.name or p.name.endswith(".b_0"))
    declared = {"lamb": {"exclude_from_weight_decay": ["batch_norm", ".b_0"]}}
    adam = optimizer.Adam(0.01, epsilon=1e-6)
    assert losses(*started(described=own), "resnet") == losses(*started(described=adam, declared=declared), "resnet")


def test_adamw_asks_by_paddles_names_what_decays():
    described = optimizer.AdamW(0.01, weight_decay=0.1, apply_decay_param_fun=lambda name: name.endswith(".w_0"))
    model, _ = started(described=described)
    decays, others = optimizer_of(model).param_groups
    assert (decays["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    assert {id(p) for p in others["params"]} == {id(p) for p in biases}


@pytest.mark.parametrize("clip", [fluid.clip.GradientClipByGlobalNorm(0.5), nn.ClipGradByGlobalNorm(clip_norm=0.5)])
def test_clipping_by_the_global_norm_is_that_of_the_strategy(clip):
    described = fluid.optimizer.SGD(0.1, grad_clip=clip)
    assert losses(*started(described=described), "resnet") == losses(
        *started(described=fluid.optimizer.SGD(0.1), declared={"clip": {"clip_norm": 0.5}}), "resnet"
    )
    with pytest.raises(StrategyError, match=r"is 2\.0, but grad_clip of the optimizer is 0\.5"):
        minimized(described=fluid.optimizer.SGD(0.1, grad_clip=clip), declared={"clip": {"clip_norm": 2.0}})


def test_clipping_of_single_tensors_is_refused_with_what_there_is():
    for find in (lambda: fluid.clip.GradientClipByNorm, lambda: nn.ClipGradByNorm):
        with pytest.raises(AttributeError, match=r"does not support .*ByNorm: .*ClipGradByGlobalNorm.*dgc_configs"):
            find()


def test_decay_and_clips_take_the_words_of_paddle():
    for decay in (fluid.regularizer.L2Decay, fluid.regularizer.L2DecayRegularizer):
        assert fluid.optimizer.SGD(0.1, regularization=decay(regularization_coeff=0.2)).decay == 0.2
    assert nn.ClipGradByGlobalNorm(0.5, group_name="default_group") == nn.ClipGradByGlobalNorm(0.5)
    with pytest.raises(UsageError, match=r"group_name = 'mine': .* remove it"):
        fluid.clip.GradientClipByGlobalNorm(0.5, group_name="mine")


def test_the_strategy_is_that_of_the_moment_and_its_problems_are_heard_at_once():
    fleet.init()
    strategy = fleet.DistributedStrategy(gradient_merge={"k_steps": 2})
    given = paddle_fleet.distributed_optimizer(fluid.optimizer.SGD(0.1), strategy)
    strategy.gradient_merge_configs = {"k_steps": 4}
    assert given.strategy.gradient_merge_configs["k_steps"] == 2
    both = fleet.DistributedStrategy(dgc=True, fp16_allreduce=True)
    with pytest.raises(StrategyError, match="`dgc` and `fp16_allreduce` both compress what the ranks send"):
        paddle_fleet.distributed_optimizer(fluid.optimizer.SGD(0.1), both)
    with pytest.raises(TypeError, match=r"must be a fleet\.DistributedStrategy"):
        paddle_fleet.distributed_optimizer(fluid.optimizer.SGD(0.1), {"amp": True})


def test_one_of_torchs_own_goes_to_fleetx_as_it_is():
    paddle_fleet.init(is_collective=True)
    model = paddle_fleet.distributed_model(make("resnet"))
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    assert paddle_fleet.distributed_optimizer(update) is update


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fluid.optimizer.SGD("fast"), "learning_rate = 'fast': must be a number of at least 0, or a schedule"),
        (lambda: fluid.optimizer.SGD(-1), "must be a number of at least 0"),
        (lambda: optimizer.Adam(weight_decay="L1"), "must be an L2Decay"),
        (lambda: optimizer.Adam(lazy_mode=True), "lazy_mode=True is for sparse gradients"),
        (lambda: fluid.optimizer.SGD(0.1, grad_clip=0.5), "grad_clip = 0.5: must be a GradientClipByGlobalNorm"),
        (
            lambda: fluid.optimizer.LarsMomentum(0.1, 0.9, regularization=regularizer.L2Decay(0.1)),
            "LarsMomentum already has lars_weight_decay, and regularization = 0.1",
        ),
        (lambda: optimizer.SGD(lr.NoamDecay(8, 4)).set_lr(0.1), "the learning rate is a schedule"),
        (lambda: fluid.layers.piecewise_decay([1], [0.1]), "1 boundaries need 2 values, not 1"),
        (
            lambda: fluid.layers.piecewise_decay([5, 2], [3, 2, 1]),
            r"boundaries = \[5, 2\]: each number must be larger than",
        ),
        (lambda: lr.PiecewiseDecay([2, 2], [3, 2, 1]), r"boundaries = \[2, 2\]"),
        (lambda: lr.MultiStepDecay(1.0, [3, 1]), r"milestones = \[3, 1\]"),
        (lambda: lr.StepDecay(0.1, step_size=0), "step_size = 0: must be a number above 0"),
        (lambda: lr.CosineAnnealingDecay(0.1, T_max=0), "T_max = 0"),
        (lambda: fluid.layers.exponential_decay(0.1, 0, 0.5), "decay_steps = 0"),
        (lambda: fluid.layers.cosine_decay(0.1, 0, 5), "step_each_epoch = 0"),
        (lambda: optimizer.SGD(0.1, parameters="fc_0.w_0"), "parameters must be a list, not a single str"),
    ],
)
def test_what_cannot_be_described_is_refused(call, says):
    with pytest.raises(UsageError, match=says):
        call()


def test_a_pattern_that_excludes_nothing_is_refused():
    with pytest.raises(StrategyError, match="LarsMomentum: 'batchnorm' in exclude_from_weight_decay matches no"):
        started(described=fluid.optimizer.LarsMomentum(0.1, 0.9, exclude_from_weight_decay=["batchnorm"]))


# --- learning rates -------------------------------------------------------------------------------
def used(described, runs, *, between=lambda: None):
    """The rates with which the updates are made."""
    model, executor = started(described=described)
    found = []
    for _ in range(runs):
        executor.run(model.main_prog, batch("resnet", rows=2))
        found.append(optimizer_of(model).param_groups[0]["lr"])
        between()
    return found


def test_a_schedule_of_fluid_moves_with_each_run():
    rate = fluid.layers.piecewise_decay([2, 3], [0.3, 0.2, 0.1])
    described = fluid.optimizer.SGD(rate)
    assert used(described, 3) == [0.3, 0.3, 0.2]
    assert described.get_lr() == 0.1
    assert used(fluid.optimizer.SGD(rate), 5) == [0.3, 0.3, 0.2, 0.1, 0.1]


def test_a_schedule_of_paddle_moves_when_the_script_says_so():
    rate = lr.StepDecay(0.4, step_size=1, gamma=0.5)
    described = optimizer.SGD(rate)
    assert used(described, 2) == [0.4, 0.4]
    assert used(described, 3, between=rate.step) == [0.4, 0.2, 0.1]
    assert described.get_lr() == 0.05


def test_a_rate_that_is_set_is_used_from_the_next_run_on():
    described = optimizer.SGD(0.4)
    assert used(described, 2, between=lambda: described.set_lr(0.1)) == [0.4, 0.1]


def test_the_old_warm_up_is_a_rate_too():
    assert used(fluid.optimizer.SGD(linear_warmup_decay(0.4, 2, 8)), 4) == [0.0, 0.2, 0.4 * 0.75, 0.4 * 0.625]


BY_RUN = {
    "exponential": (fluid.layers.exponential_decay(0.1, 2, 0.5), [0.1, 0.1 * 0.5**0.5, 0.05]),
    "staircase": (fluid.layers.exponential_decay(0.1, 2, 0.5, staircase=True), [0.1, 0.1, 0.05]),
    "natural": (fluid.layers.natural_exp_decay(0.1, 2, 0.5), [0.1, 0.1 * math.exp(-0.25), 0.1 * math.exp(-0.5)]),
    "inverse": (fluid.layers.inverse_time_decay(0.1, 1, 1.0), [0.1, 0.05, 0.1 / 3]),
    "polynomial": (fluid.layers.polynomial_decay(1.0, 2, 0.5), [1.0, 0.75, 0.5]),
    "cycle": (fluid.layers.polynomial_decay(1.0, 1, 0.0, cycle=True), [1.0, 0.0, 0.0]),
    "cosine": (fluid.layers.cosine_decay(1.0, 1, 2), [1.0, 0.5, 0.0]),
    "noam": (fluid.layers.noam_decay(4, 2), [0.5 * 2**-1.5, 0.5 * 2 * 2**-1.5, 0.5 * 3**-0.5]),
    "warm-up": (fluid.layers.linear_lr_warmup(0.3, 2, 0.0, 0.2), [0.0, 0.1, 0.3]),
    "warm-up before": (
        fluid.layers.linear_lr_warmup(fluid.layers.inverse_time_decay(0.3, 1, 1.0), 2, 0.0, 0.2),
        [0.0, 0.1, 0.1],
    ),
}
BY_STEP = {
    "noam": (lr.NoamDecay(4, 2), [0.0, 0.5 * 2**-1.5, 0.5 * 2 * 2**-1.5]),
    "piecewise": (lr.PiecewiseDecay([1, 2], [3, 2, 1]), [3, 2, 1]),
    "natural": (lr.NaturalExpDecay(0.1, 0.5), [0.1, 0.1 * math.exp(-0.5), 0.1 * math.exp(-1)]),
    "inverse": (lr.InverseTimeDecay(0.1, 1), [0.1, 0.05, 0.1 / 3]),
    "exponential": (lr.ExponentialDecay(0.1, 0.5), [0.1, 0.05, 0.025]),
    "polynomial": (lr.PolynomialDecay(1.0, 2, end_lr=0.5), [1.0, 0.75, 0.5]),
    "warm-up": (lr.LinearWarmup(lr.ExponentialDecay(0.3, 0.5), 1, 0.0, 0.2), [0.0, 0.3, 0.15]),
    "warm-up of a number": (lr.LinearWarmup(0.3, 1, 0.0, 0.2), [0.0, 0.3, 0.3]),
    "milestones": (lr.MultiStepDecay(1.0, [1, 2]), [1.0, 0.1, 0.01]),
    "step": (lr.StepDecay(1.0, 2), [1.0, 1.0, 0.1]),
    "lambda": (lr.LambdaDecay(2.0, lambda t: 1 / (t + 1)), [2.0, 1.0, 2 / 3]),
    "cosine": (lr.CosineAnnealingDecay(1.0, 2), [1.0, 0.5, 0.0]),
}


@pytest.mark.parametrize("name", BY_RUN)
def test_the_schedules_of_fluid_follow_their_formulas(name):
    rate, expected = BY_RUN[name]
    assert [rate(t) for t in range(3)] == pytest.approx(expected)


@pytest.mark.parametrize("name", BY_STEP)
def test_the_schedules_of_paddle_follow_their_formulas_and_go_on_later(name):
    rate, expected = BY_STEP[name]
    found = []
    for _ in range(3):
        found.append(rate())
        state = rate.state_dict()
        rate.step()
        rate.set_state_dict(state)
        rate.step()
    assert found == pytest.approx(expected)
    assert rate.last_epoch == 3


def test_a_schedule_of_ones_own_says_its_rate_by_get_lr(capsys):
    class Halves(lr.LRScheduler):
        def get_lr(self):
            return self.base_lr / 2**self.last_epoch

    rate = Halves(1.0, verbose=True)
    rate.step()
    assert rate() == 0.5
    assert "Epoch 1: Halves set learning rate to 0.5." in capsys.readouterr().out


def test_a_schedule_of_ones_own_may_go_by_the_rate_before():
    class Halved(lr.LRScheduler):
        def get_lr(self):
            return self.last_lr * 0.5

    rate = Halved(1.0)
    assert rate() == 0.5
    rate.step()
    assert rate() == 0.25
    with pytest.raises(
        AttributeError, match=r"does not support paddle\.optimizer\.lr\.LRScheduler\.last_rl: did you mean"
    ):
        _ = rate.last_rl


def test_numbers_of_numpy_are_numbers():
    described = fluid.optimizer.SGD(np.float32(0.5), regularization=fluid.regularizer.L2Decay(np.float64(0.25)))
    assert (described.get_lr(), described.decay) == (0.5, 0.25)


# --- a run that is resumed ------------------------------------------------------------------------
def rates_of(model, executor, runs):
    found = []
    for _ in range(runs):
        executor.run(model.main_prog, batch("resnet", rows=2))
        found.append(optimizer_of(model).param_groups[0]["lr"])
    return found


def scheduled():
    return fluid.optimizer.SGD(fluid.layers.piecewise_decay([2, 5], [0.3, 0.2, 0.1]))


@pytest.mark.parametrize("declared", [{}, {"gradient_merge": {"k_steps": 2}}])
def test_a_schedule_goes_on_where_the_checkpoint_was_saved(tmp_path, declared):
    first, executor = started(described=scheduled(), declared=declared)
    before = rates_of(first, executor, 3)
    fleet.save(tmp_path / "saved", model=first)
    described = scheduled()
    second, executor = started(described=described, declared=declared)
    fleet.load(tmp_path / "saved", model=second)
    assert described.get_lr() == 0.2
    assert before + rates_of(second, executor, 3) == [0.3, 0.3, 0.2, 0.2, 0.2, 0.1]
    assert described.get_lr() == 0.1


@pytest.mark.parametrize("k_steps", [1, 2])
def test_a_checkpoint_of_an_eager_run_tells_the_runs_by_its_rounds_or_not_at_all(tmp_path, k_steps):
    fleet.init()
    declared = {"gradient_merge": {"k_steps": k_steps}} if k_steps > 1 else {}
    model = make("resnet")
    model, update = fleet.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(**declared)
    )
    for _ in range(4):
        model(**batch("resnet", rows=2)).loss.backward()
        update.step()
        update.zero_grad()
    fleet.save(tmp_path / "saved", model=model)
    other, executor = started(described=scheduled(), declared=declared)
    fleet.load(tmp_path / "saved", model=other)
    if k_steps == 1:
        assert rates_of(other, executor, 2) == [0.2, 0.1]
    else:
        with pytest.raises(UsageError, match="does not hold the number of runs"):
            rates_of(other, executor, 1)


# --- parameters -----------------------------------------------------------------------------------
def test_parameters_are_given_as_torch_has_them():
    fleet.init()
    model, other = make("resnet"), make("resnet")
    chosen = optimizer.SGD(0.1, parameters=model.classifier.parameters())  # an iterator, which is read once
    chosen.minimize(model.loss)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["classifier.1.weight", "classifier.1.bias"]
    with pytest.raises(UsageError, match="an item of type Parameter is not a parameter of this model"):
        optimizer.SGD(0.1, parameters=model.parameters()).minimize(other.loss)
    with pytest.raises(UsageError, match=r"the parameter 'conv2d_0\.w_0' belongs to a different model"):
        optimizer.SGD(0.1).minimize(other.loss, no_grad_set=model.parameter_list())
    with pytest.raises(UsageError, match="not a single str: write"):
        optimizer.SGD(0.1).minimize(other.loss, no_grad_set="fc_0.w_0")
    with pytest.raises(UsageError, match="an item of type int is not a parameter"):
        optimizer.SGD(0.1).minimize(other.loss, parameter_list=[3])
    assert all(p.requires_grad for p in other.parameters())


@pytest.mark.parametrize("name", ["step", "clear_grad", "state_dict", "backward", "apply_gradients"])
def test_a_method_that_is_not_covered_says_so(name):
    fleet.init()
    for described in (optimizer.SGD(0.1), paddle_fleet.distributed_optimizer(fluid.optimizer.Adam(0.1))):
        with pytest.raises(AttributeError, match=rf"does not support paddle\.optimizer\.Optimizer\.{name}: .*minimize"):
            getattr(described, name)
