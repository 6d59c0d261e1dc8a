"""Schedules: against the formula in float64, as ordinary schedulers, and counting applied updates."""

from __future__ import annotations

import copy
import io
import itertools
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from covering import cases
from fleetx import StrategyError, fleet
from fleetx.optim import schedule
from training import batches, net, sgd

PAGE = (Path(__file__).parents[2] / "docs" / "schedule.md").read_text()
DECAYS = ["polynomial", "linear", "cosine", "none"]


def optimizer(*rates, tensor=False):
    groups = [{"params": [torch.zeros(2, requires_grad=True)], "lr": torch.tensor(r) if tensor else r} for r in rates]
    return torch.optim.SGD(groups, lr=0.1)


def rates(scheduler, n):
    """The rates of each group in n updates of an ordinary loop."""
    seen = []
    for _ in range(n):
        seen.append([float(group["lr"]) for group in scheduler.optimizer.param_groups])
        assert [float(r) for r in scheduler.get_last_lr()] == seen[-1]
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def reference(t, *, updates, warmup, decay, power=2.0, end=0.0):
    """The formula of docs/schedule.md."""
    if t < warmup:
        return (t + 1) / warmup
    s = min(1.0, (t - warmup) / (updates - warmup)) if updates > warmup else 1.0
    shape = {
        "polynomial": (1 - s) ** power,
        "linear": 1 - s,
        "cosine": (1 + math.cos(math.pi * s)) / 2,
        "none": 1.0,
    }
    return end + (1 - end) * shape[decay]


# --- the formula ------------------------------------------------------------------------------------
@cases(decay=DECAYS, warmup=[0, 1, 5, 20], end=[0.0, 0.05])
def test_every_update_has_the_rate_of_the_formula_also_past_the_end(decay, warmup, end):
    end = 0.0 if decay == "none" else end
    o = optimizer(0.4, 0.003)
    scheduler = schedule.large_batch(
        o, updates=20, warmup=warmup, decay=decay, end=end, batch=4096, base_batch=256, scaling="sqrt"
    )
    for t, (first, second) in enumerate(rates(scheduler, 25)):
        factor = reference(t, updates=20, warmup=warmup, decay=decay, end=end)
        assert first == pytest.approx(0.4 * 4 * factor, rel=1e-14, abs=1e-16)
        assert second == pytest.approx(0.003 * 4 * factor, rel=1e-14, abs=1e-18)


def test_the_power_of_a_polynomial_can_be_chosen():
    got = rates(schedule.large_batch(optimizer(1.0), updates=10, warmup=2, power=0.5), 10)
    assert got == [
        [pytest.approx(reference(t, updates=10, warmup=2, decay="polynomial", power=0.5))] for t in range(10)
    ]


def test_no_update_is_wasted_at_rate_zero():
    assert all(r > 0 for [r] in rates(schedule.large_batch(optimizer(1.0), updates=30, warmup=10), 30))


def test_a_warmup_below_one_is_a_fraction_of_all_updates():
    by_fraction = rates(schedule.large_batch(optimizer(1.0), updates=7038, warmup=0.2843), 3000)
    assert by_fraction == rates(schedule.large_batch(optimizer(1.0), updates=7038, warmup=2001), 3000)


@given(st.data())
def test_the_rate_rises_to_the_peak_without_a_jump_and_falls_from_there(data):
    updates = data.draw(st.integers(1, 200))
    warmup = data.draw(st.integers(0, updates))
    decay = data.draw(st.sampled_from(DECAYS))
    end = 0.0 if decay == "none" else data.draw(st.floats(0, 1))
    peak = data.draw(st.floats(1e-6, 100))
    got = [
        r
        for [r] in rates(
            schedule.large_batch(optimizer(peak), updates=updates, warmup=warmup, decay=decay, end=end), updates + 3
        )
    ]
    up, down = got[:warmup], got[warmup:]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert max(got) == peak
    if warmup:
        assert up[-1] == peak
        assert all(b - a == pytest.approx(peak / warmup) for a, b in itertools.pairwise(up))
    if warmup < updates:
        assert down[0] == peak
    assert set(got[updates:]) == {peak if decay == "none" else peak * end}


# --- the batch --------------------------------------------------------------------------------------
@given(st.floats(1e-6, 100), st.integers(1, 10**6), st.integers(1, 1000))
def test_scaling_by_the_batch_is_exact(lr, base, times):
    assert schedule.linear_scaling(lr, base * times, base) == lr * times
    assert schedule.sqrt_scaling(lr, base * times**2, base) == lr * times
    assert schedule.linear_scaling(lr, base, base) == schedule.sqrt_scaling(lr, base, base) == lr
    o = optimizer(lr)
    schedule.large_batch(o, updates=1, batch=base * times, base_batch=base, scaling="linear")
    assert o.param_groups[0]["lr"] == lr * times


# --- an ordinary scheduler --------------------------------------------------------------------------
def test_it_is_a_torch_scheduler_and_the_usual_loop_does_not_warn():
    o = optimizer(0.1)
    scheduler = schedule.large_batch(o, updates=10)
    assert isinstance(scheduler, LRScheduler)
    assert scheduler.base_lrs == [0.1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates(scheduler, 5)
    assert scheduler.last_epoch == 5


def test_a_step_in_the_wrong_order_warns_like_torch():
    scheduler = schedule.large_batch(optimizer(0.1), updates=10)
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        scheduler.step()


def test_a_rate_that_is_a_tensor_stays_that_tensor():
    o = optimizer(0.1, 0.2, tensor=True)
    tensors = [group["lr"] for group in o.param_groups]
    scheduler = schedule.large_batch(o, updates=10, warmup=4)
    rates(scheduler, 3)
    assert all(group["lr"] is t for group, t in zip(o.param_groups, tensors, strict=True))
    torch.testing.assert_close(torch.stack(tensors), torch.tensor([0.1, 0.2]))
    last = scheduler.get_last_lr()
    last[0].fill_(7.0)
    assert float(tensors[0]) != 7.0


def test_it_can_follow_another_scheduler():
    o = optimizer(1.0)
    constant = torch.optim.lr_scheduler.ConstantLR(o, factor=0.5, total_iters=100)
    both = SequentialLR(o, [constant, schedule.large_batch(o, updates=4, decay="linear")], milestones=[3])
    assert rates(both, 7) == [[0.5], [0.5], [0.5], [1.0], [0.75], [0.5], [0.25]]


# --- saved and loaded -------------------------------------------------------------------------------
def saved(o, scheduler):
    """Saved to a file and loaded with the defaults of `torch.load`."""
    file = io.BytesIO()
    torch.save({"optimizer": o.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@given(st.data())
def test_a_run_resumed_at_any_update_is_the_unbroken_run(data):
    tensor = data.draw(st.booleans())
    updates, first = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 45))
    settings = {
        "updates": updates,
        "warmup": data.draw(st.integers(0, updates)),
        "decay": data.draw(st.sampled_from(["polynomial", "linear", "cosine"])),
        "end": data.draw(st.floats(0, 1)),
    }
    whole = rates(schedule.large_batch(optimizer(0.7, 0.03, tensor=tensor), **settings), 50)
    before = optimizer(0.7, 0.03, tensor=tensor)
    broken = schedule.large_batch(before, **settings)
    head = rates(broken, first)
    file = saved(before, broken)
    o = optimizer(0.7, 0.03, tensor=tensor)
    if data.draw(st.booleans()):  # torch needs the other order; here both work
        o.load_state_dict(file["optimizer"])
        scheduler = schedule.large_batch(o, **settings)
    else:
        scheduler = schedule.large_batch(o, **settings)
        o.load_state_dict(file["optimizer"])
    scheduler.load_state_dict(file["scheduler"])
    assert scheduler.state_dict() == broken.state_dict()
    assert head + rates(scheduler, 50 - first) == whole


def test_loading_leaves_the_saved_state_alone():
    o = optimizer(0.1)
    scheduler = schedule.large_batch(o, updates=10)
    rates(scheduler, 3)
    state = scheduler.state_dict()
    before = copy.deepcopy(state)
    other = schedule.large_batch(optimizer(0.1), updates=10)
    other.load_state_dict(state)
    rates(other, 2)
    assert state == before


def test_new_settings_override_saved_ones_with_a_warning():
    old = schedule.large_batch(optimizer(1.0), updates=10, decay="linear")
    rates(old, 5)
    o = optimizer(1.0)
    longer = schedule.large_batch(o, updates=20, decay="linear")
    with pytest.warns(UserWarning, match=r"updates=20 \(saved: 10\)"):
        longer.load_state_dict(old.state_dict())
    assert longer.get_last_lr() == [0.75]
    assert o.param_groups[0]["lr"] == 0.75


def test_the_state_of_another_scheduler_or_optimizer_raises_an_error():
    scheduler = schedule.large_batch(optimizer(1.0), updates=10)
    with pytest.raises(StrategyError, match="saved by a scheduler that is not from fleetx"):
        scheduler.load_state_dict(torch.optim.lr_scheduler.StepLR(optimizer(1.0), 3).state_dict())
    two = schedule.large_batch(optimizer(1.0, 2.0), updates=10)
    with pytest.raises(StrategyError, match="with 2 parameter groups, but this one has 1"):
        scheduler.load_state_dict(two.state_dict())


# --- by applied updates -----------------------------------------------------------------------------
def distributed(**declared):
    """A model with a strategy, its optimizer, and a scheduler that counts updates."""
    fleet.init()
    model = net()
    model, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    return model, o, schedule.large_batch(o, updates=8, decay="linear", by="updates")


def step(model, o, x, y):
    mse_loss(model(x), y).backward()
    o.step()
    o.zero_grad()


def counted(model, o, scheduler, n):
    """The number of updates that the scheduler has counted after each of n steps."""
    seen = []
    for x, y in batches(n):
        step(model, o, x, y)
        scheduler.step()
        seen.append(scheduler.last_epoch)
    return seen


def test_by_updates_ignores_merged_steps():
    model, o, scheduler = distributed(gradient_merge={"k_steps": 4})
    assert counted(model, o, scheduler, 8) == [0, 0, 0, 1, 1, 1, 1, 2]
    assert scheduler.get_last_lr() == [o.param_groups[0]["lr"]] == [0.1 * 6 / 8]
    assert counted(model, o, schedule.large_batch(o, updates=8), 4) == [1, 2, 3, 4]  # by steps


def test_by_updates_ignores_overflowed_steps():
    overflows_once = {"init_loss_scaling": 2.0**40, "decr_every_n_nan_or_inf": 1, "decr_ratio": 2.0**-30}
    assert counted(*distributed(amp=overflows_once), 4) == [0, 1, 2, 3]


def test_each_scheduler_follows_its_own_optimizer():
    """Both step before either scheduler does, so `fleet.updated`, which is about the last step, is wrong for one."""
    both = [distributed(gradient_merge={"k_steps": k}) for k in (1, 2)]
    for x, y in batches(3):
        for model, o, _ in both:
            step(model, o, x, y)
        for _, _, scheduler in both:
            scheduler.step()
    assert [scheduler.last_epoch for _, _, scheduler in both] == [3, 1]


def test_a_flushed_merge_counts_as_an_update():
    model, o, scheduler = distributed(gradient_merge={"k_steps": 4})
    counted(model, o, scheduler, 6)
    assert fleet.flush()
    scheduler.step()
    assert scheduler.last_epoch == 2


def test_without_a_strategy_every_step_is_an_update():
    by_updates = rates(schedule.large_batch(optimizer(0.5), updates=9, warmup=3, by="updates"), 12)
    assert by_updates == rates(schedule.large_batch(optimizer(0.5), updates=9, warmup=3), 12)


@pytest.mark.slow
def test_it_does_not_load_the_facade():
    code = "import fleetx, sys; fleetx.schedule.large_batch; assert 'fleetx.fleet' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


# --- linear_warmup_decay ----------------------------------------------------------------------------
def test_linear_warmup_decay_matches_the_original():
    """From 0, and after the warm-up on the line from the full rate at step 0 to 0 at the last step."""
    law = schedule.linear_warmup_decay(0.5, 4, 10)
    want = [0.0, 0.125, 0.25, 0.375, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0, 0.0]
    assert [law(t) for t in range(12)] == pytest.approx(want)
    o = optimizer(99.0, 99.0)
    assert rates(law.bind(o), 12) == [[pytest.approx(r)] * 2 for r in want]


def test_linear_warmup_decay_can_be_bound_after_another_scheduler_and_saved():
    o = optimizer(0.1, tensor=True)
    schedule.large_batch(o, updates=5)
    scheduler = schedule.linear_warmup_decay(1.0, 0, 4).bind(o, by="updates")
    head = rates(scheduler, 2)
    other = optimizer(0.1, tensor=True)
    again = schedule.linear_warmup_decay(1.0, 0, 4).bind(other, by="updates")
    again.load_state_dict(saved(o, scheduler)["scheduler"])
    assert head + rates(again, 2) == [[1.0], [0.75], [0.5], [0.25]]


def test_linear_warmup_decay_has_one_rate_for_all_groups():
    with pytest.raises(StrategyError, match="different rates"):
        schedule.linear_warmup_decay(1.0, 1, 4).bind(optimizer(0.1, 0.2))
    with pytest.raises(StrategyError, match="did you mean 'updates'"):
        schedule.linear_warmup_decay(1.0, 1, 4).bind(optimizer(0.1), by="update")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((-1.0, 1, 4), "learning_rate = -1.0: must be a number"),
        ((1.0, -1, 4), "warmup_steps = -1: must be an integer, at least 0"),
        ((1.0, 1, 0), "num_train_steps = 0: must be an integer, at least 1"),
        ((1.0, 5, 4), "warmup_steps = 5: must be at most num_train_steps = 4"),
    ],
)
def test_linear_warmup_decay_checks_its_arguments(args, message):
    with pytest.raises(StrategyError, match=re.escape(message)):
        schedule.linear_warmup_decay(*args)


# --- bad arguments ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"updates": 0}, "updates = 0: must be an integer, at least 1"),
        ({"updates": 2.5}, "updates = 2.5: must be an integer, at least 1"),
        ({"updates": True}, "updates = True: must be an integer"),
        ({"warmup": 11}, "warmup = 11: must be at most updates = 10"),
        ({"warmup": -1}, "warmup = -1: must be an integer, at least 0"),
        ({"warmup": 5.0}, "warmup = 5.0: a float is a fraction of all updates"),
        ({"warmup": math.nan}, "warmup = nan: a float is a fraction of all updates"),
        ({"decay": "cosin"}, "decay = 'cosin': did you mean 'cosine'?"),
        ({"decay": "step"}, "decay = 'step': must be one of 'polynomial', 'linear', 'cosine', 'none'"),
        ({"power": 0}, "power = 0: must be a number above 0"),
        ({"power": 2, "decay": "cosine"}, "power has no effect with decay='cosine'"),
        ({"end": 1.5}, "end = 1.5: must be a fraction of the peak"),
        ({"end": 0.1, "decay": "none"}, "end has no effect with decay='none'"),
        ({"by": "update"}, "by = 'update': did you mean 'updates'?"),
        ({"scaling": "linear"}, "batch is missing"),
        ({"scaling": "linear", "batch": 512}, "base_batch is missing"),
        ({"scaling": "linear", "batch": 0, "base_batch": 1}, "batch = 0: must be a number of samples above 0"),
        ({"scaling": "linea", "batch": 512, "base_batch": 1}, "scaling = 'linea': did you mean 'linear'?"),
        ({"batch": 512, "base_batch": 256}, "add scaling='linear' or scaling='sqrt'"),
    ],
)
def test_bad_arguments_raise_an_error_with_a_hint(given_, message):
    with pytest.raises(StrategyError, match=re.escape(message)):
        schedule.large_batch(optimizer(0.1), **{"updates": 10} | given_)


def test_all_problems_are_reported_together_and_nothing_changes():
    o = optimizer(0.1)
    with pytest.raises(StrategyError) as caught:
        schedule.large_batch(o, updates=0, warmup=-1, decay="x", scaling="sqrt")
    assert len(caught.value.problems) == 5
    assert o.param_groups[0]["lr"] == 0.1
    assert "initial_lr" not in o.param_groups[0]


def test_torch_rejects_an_argument_that_is_not_an_optimizer():
    with pytest.raises(TypeError, match="is not an Optimizer"):
        schedule.large_batch(net(), updates=3)


# --- documentation ----------------------------------------------------------------------------------
def test_the_examples_in_the_documentation_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) >= 2
    fleet.init()
    for block in blocks:
        model = net()
        names = {"model": model, "loader": batches(8), "loss_fn": mse_loss}
        before = copy.deepcopy(model.state_dict())
        exec(block, names)
        after = names["model"].state_dict()
        assert any(not torch.equal(before[k], after[k]) for k in before)


def test_inside_sequential_lr_the_warmup_starts_at_its_first_rate():
    def rates(by):
        fleet.init()
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy())
        first = schedule.large_batch(optimizer, updates=8, warmup=4, by=by)
        both = torch.optim.lr_scheduler.SequentialLR(
            optimizer, [first, torch.optim.lr_scheduler.ConstantLR(optimizer)], milestones=[6]
        )
        out = []
        for _ in range(5):
            out.append(optimizer.param_groups[0]["lr"])
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            both.step()
        return out

    assert rates("updates") == rates("steps") == [0.25, 0.5, 0.75, 1.0, 1.0]


# --- what each rule for the rate keeps ------------------------------------------------------------
def test_the_noise_rule_is_the_best_rate_of_one_step_on_a_noisy_quadratic():
    """The loss is h |w|^2 / 2, the noise of the gradient has the variance s^2 per sample and coordinate."""
    h, s, w = 0.7, 3.0, torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    noise = len(w) * s**2 / float((h * w).square().sum())  # tr(covariance) / |gradient|^2

    def best(batch):
        gradient, trace = float((h * w).square().sum()), len(w) * s**2 / batch
        return gradient / (h * (gradient + trace))  # the minimum of |w|^2 - 2 lr w.g + lr^2 (|g|^2 + trace)

    for batch in (1, 4, 64, 4096):
        assert schedule.noise_scaling(best(16), batch, 16, noise) == pytest.approx(best(batch))


def test_the_noise_rule_is_linear_for_small_batches_and_constant_for_large_ones():
    assert schedule.noise_scaling(0.1, 64, 16, 1e12) == pytest.approx(schedule.linear_scaling(0.1, 64, 16))
    assert schedule.noise_scaling(0.1, 64, 16, 0) == 0.1
    gains = [schedule.noise_scaling(1.0, 64, 16, noise) for noise in (1, 10, 100, 1000)]
    assert gains == sorted(gains)
    assert 1 < gains[0] < gains[-1] < 4


def test_the_square_root_keeps_the_covariance_of_an_update_and_the_linear_rule_its_mean():
    """An update is lr times the mean of B gradients: its covariance is lr^2 C / B, an epoch adds up to lr g n / B."""
    root = schedule.sqrt_scaling(0.1, 64, 16)
    assert root**2 / 64 == pytest.approx(0.1**2 / 16)
    linear = schedule.linear_scaling(0.1, 64, 16)
    assert linear * (1024 / 64) == pytest.approx(0.1 * (1024 / 16))


def test_the_noise_rule_needs_the_noise_scale():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(StrategyError, match="needs the noise scale"):
        schedule.large_batch(optimizer, updates=2, batch=4, base_batch=2, scaling="noise")
    with pytest.raises(StrategyError, match="noise has no effect"):
        schedule.large_batch(optimizer, updates=2, batch=4, base_batch=2, scaling="sqrt", noise=3.0)
    schedule.large_batch(optimizer, updates=2, batch=4, base_batch=2, scaling="noise", noise=2.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 2 / 1.5)


def test_samples_can_be_counted_over_a_change_of_the_number_of_workers():
    def made(step_samples):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        return optimizer, schedule.large_batch(
            optimizer, updates=64, warmup=16, decay="linear", by="samples", step_samples=step_samples
        )

    optimizer, scheduler = made(8)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    other, resumed = made(4)
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.samples == 32
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(1 - 16 / 48)
    with pytest.raises(StrategyError, match="step_samples"):
        schedule.large_batch(other, updates=64, by="samples")
    with pytest.raises(StrategyError, match="step_samples has no effect"):
        schedule.large_batch(other, updates=64, step_samples=3)
