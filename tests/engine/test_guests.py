"""Code that also manages the model: it works, or raises one clear error."""

from __future__ import annotations

import gc
import math
import warnings

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import weight_norm

from fleetx import StrategyError, UsageError, fleet
from fleetx.comm.session import current
from fleetx.engine.dtensors import local
from rank_pool import forget
from training import (
    assert_close,
    assert_equal,
    batches,
    net,
    sgd,
    share,
    train,
    train_fleet,
    weights,
    zero_last,
)


class Wrapper(torch.optim.Optimizer):
    """As accelerate's prepare() returns it: without torch's __init__."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        self.optimizer.step(closure)


def test_an_optimizer_that_wraps_another_is_an_error():
    fleet.init()
    model = net()
    with pytest.raises(StrategyError, match=r"Wrapper wraps another optimizer .* pass the wrapped one"):
        fleet.distribute(model, Wrapper(sgd(model)), fleet.DistributedStrategy())


def build(settings, *, make=net, optimizer=sgd):
    fleet.init()
    model = make()
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**settings))


def double():
    return net().double()


# --- a GradScaler of the script -------------------------------------------------------------------
def with_scaler(model, optimizer, scaler, x, y):
    scaler.scale(mse_loss(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


SCALED = [{"gradient_merge": {"k_steps": 2}}, {"amp": {"dtype": "float16"}}, {"localsgd": {"allow_single": True}}]


@pytest.mark.parametrize("settings", SCALED, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_of_the_script_is_an_error_where_scales_would_be_mixed(settings, fused):
    """At the first step, even if that one overflows."""
    optimizer = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=fused)  # noqa: E731
    model, o = build(settings, optimizer=optimizer)
    x, y = batches(1)[0]
    before = weights(model)
    with pytest.raises(UsageError, match=r"GradScaler .* remove the GradScaler, .* strategy.amp = True"):
        with_scaler(model, o, torch.amp.GradScaler("cpu", init_scale=2.0**125), x, y)
    assert_equal(weights(model), before)


@pytest.mark.parametrize("settings", SCALED, ids=str)
def test_a_scaler_that_is_off_is_nothing(settings):
    def loop(model, optimizer, x, y):
        with_scaler(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), x, y)

    assert_equal(train_fleet(batches(), settings, loop=loop), train_fleet(batches(), settings))


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_of_the_script_works_with_clip(fused):
    """A fused optimizer would be handed gradients that are clipped while they are scaled."""
    optimizer = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=fused)  # noqa: E731
    model, o = build({"clip": {"clip_norm": 0.1}}, optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in batches():
        with_scaler(model, o, scaler, x, y)

    def by_hand(model, optimizer, x, y):
        mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    assert_close(weights(model), train(batches(), optimizer=optimizer, loop=by_hand))


def scaled_on_two():
    model, o = build({})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for i, (x, y) in enumerate(share(batches(), fleet.worker_index(), 2)):
        if i == 3 and fleet.worker_index() == 1:
            x = x * float("inf")
        with_scaler(model, o, scaler, x, y)
    return weights(model), scaler.get_scale()


def test_a_scaler_of_the_script_skips_the_same_steps_on_all_ranks(ranks):
    (first, scale), (second, other) = ranks.run(scaled_on_two)
    assert_equal(first, second)
    assert_close(first, train([b for i, b in enumerate(batches()) if i != 3]))
    assert scale == other == 2.0**15


# --- parameters that are converted or replaced -----------------------------------------------------
CONVERSIONS = {
    "bfloat16": lambda m: m.bfloat16(),
    "to": lambda m: m.to(torch.float64),
    "one layer": lambda m: m[2].double(),
    "fully_shard": lambda m: _fully_shard(m),
    "weight_norm": lambda m: weight_norm(m[0]),
}


def _fully_shard(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)


def converted(how, settings):
    model, optimizer = build(settings)
    x, y = batches(1)[0]
    mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    CONVERSIONS[how](model)
    model.register_forward_pre_hook(lambda m, args: (args[0].to(m[0].weight.dtype),))
    if how == "one layer":
        model[2].register_forward_pre_hook(lambda m, args: (args[0].double(),))
        model[3].register_forward_hook(lambda m, args, out: out.float())
    try:
        for _ in range(2):
            out = model(x)
            mse_loss(out, y.to(out.dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", CONVERSIONS)
@pytest.mark.parametrize(
    "settings", [{}, {"find_unused_parameters": True}, {"gradient_merge": {"k_steps": 2}}], ids=str
)
def test_parameters_that_are_converted_after_distribute_are_an_error(ranks, how, settings):
    """Their gradients would no longer be reduced."""
    for said in ranks.run(converted, how, settings):
        assert "after fleet.distribute" in said
        assert "before fleet.distribute" in said


def test_a_model_that_nothing_watches_may_be_converted():
    model, optimizer = build({}, make=double)
    model.float()
    for x, y in batches():
        zero_last(model, optimizer, x, y)
    assert_close(weights(model), train(batches()))


# --- optimizers that step through an inner one -----------------------------------------------------
class SAM(torch.optim.Optimizer):
    """As in the public implementations: two steps with a backward each, or one with a closure."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=(self.param_groups[0]["rho"] / (norm + 1e-12)).item())
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "old" in self.state[p]:
                    p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


def sam(model):
    return SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def two_steps(model, optimizer, x, y, clip=None):
    mse_loss(model(x), y).backward()
    optimizer.first_step()
    mse_loss(model(x), y).backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.second_step()


def clipped_steps(model, optimizer, x, y):
    two_steps(model, optimizer, x, y, clip=0.1)


def sam_on_two():
    return train_fleet(batches(), {"clip": {"clip_norm": 0.1}}, optimizer=sam, loop=two_steps)


def test_a_strategy_acts_on_an_optimizer_that_steps_through_an_inner_one(ranks):
    want = train(batches(), optimizer=sam, loop=clipped_steps)
    clip = {"clip": {"clip_norm": 0.1}}
    assert_close(train_fleet(batches(), clip, optimizer=sam, loop=two_steps), want)
    first, second = ranks.run(sam_on_two)
    assert_equal(first, second)
    assert_close(first, want)


def test_two_backwards_per_step_cannot_be_merged():
    model, optimizer = build({"gradient_merge": {"k_steps": 2}}, optimizer=sam)
    two_steps(model, optimizer, *batches(1)[0])
    with pytest.raises(UsageError, match=r"zero_grad\(\) after backward\(\) erased gradients"):
        two_steps(model, optimizer, *batches(1)[0])


def test_a_closure_that_is_called_at_other_parameters_is_an_error():
    def loop(model, optimizer, x, y):
        def closure():
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)

    with pytest.raises(UsageError, match="SAM changes the parameters before it calls its closure"):
        train_fleet(batches(), {"clip": True}, optimizer=sam, loop=loop)


# --- torch.autograd.grad ---------------------------------------------------------------------------
def read_gradients(settings, make):
    """Between the steps of a training: it must neither fail nor change what is trained."""

    def loop(model, optimizer, x, y):
        plain = make()
        plain.load_state_dict(model.state_dict())
        with torch.autocast("cpu", torch.float16, enabled="amp" in settings):
            out = plain(x)
        want = torch.autograd.grad(mse_loss(out.to(y.dtype), y), list(plain.parameters()))
        found = torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
        torch.testing.assert_close(found, want)
        zero_last(model, optimizer, x, y)

    return train_fleet(_data(make), settings, make=make, loop=loop)


def _data(make):
    return [(x.to(make()[0].weight.dtype), y.to(make()[0].weight.dtype)) for x, y in batches()]


READ = [({}, double), ({"gradient_merge": {"k_steps": 2}}, double), ({"amp": {"dtype": "float16"}}, net)]


@pytest.mark.parametrize(("settings", "make"), READ, ids=["plain", "merge", "float16"])
def test_autograd_grad_of_parameters_is_that_of_plain_pytorch(ranks, settings, make):
    want = train_fleet(_data(make), settings, make=make)
    assert_equal(read_gradients(settings, make), want)
    for found in ranks.run(read_gradients, settings, make):
        torch.testing.assert_close(found, want, rtol=0.01, atol=0.01 if make is net else 1e-12)


# --- a checkpoint that is loaded too early ---------------------------------------------------------
def saved_inside(settings, steps=3):
    model, optimizer = build(settings)
    for x, y in batches(steps):
        zero_last(model, optimizer, x, y)
    return optimizer.state_dict()


def test_a_merge_window_that_is_loaded_before_distribute_is_an_error():
    model = net()
    optimizer = sgd(model)
    saved = saved_inside({"gradient_merge": {"k_steps": 2}})
    optimizer.load_state_dict(saved)
    with pytest.raises(UsageError, match=r"1 step of a merge window .*load_state_dict\(\) after fleet.distribute"):
        fleet.distribute(model, optimizer, fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))
    with pytest.raises(UsageError, match="make the optimizer again"):  # not only once
        fleet.distribute(model, optimizer, fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))
    optimizer = sgd(model)
    fleet.distribute(model, optimizer, fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["fleetx"]["merged"] == 1
    assert "fleetx" not in optimizer.param_groups[0]


def test_a_checkpoint_without_a_window_may_be_loaded_before_distribute():
    model = net()
    optimizer = sgd(model)
    saved = saved_inside({"gradient_merge": {"k_steps": 2}}, steps=4)
    optimizer.load_state_dict(saved)
    fleet.distribute(model, optimizer, fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))


# --- a script that ends too early ------------------------------------------------------------------
def ends(settings, steps=3, *, then=lambda model, optimizer: None):
    fleet.init()
    model, optimizer = build(settings)
    for x, y in share(batches(steps), fleet.worker_index(), fleet.worker_num()):
        zero_last(model, optimizer, x, y)
    then(model, optimizer)
    del model, optimizer
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        current().close()
    return [str(w.message) for w in caught]


LOST = "the script ends inside a merge window: 1 step is not applied. Call fleet.flush() at the end of the data"


def test_a_window_that_is_open_at_the_end_is_told():
    merge = {"gradient_merge": {"k_steps": 2}}
    assert ends(merge) == [LOST]
    assert ends(merge, 4) == []
    assert ends(merge, then=lambda model, optimizer: fleet.flush()) == []
    assert ends(merge, then=lambda model, optimizer: optimizer.state_dict()) == []  # another run continues it


def test_a_model_that_is_still_there_at_the_end_is_told_of_too():
    model, optimizer = build({"gradient_merge": {"k_steps": 2}})
    zero_last(model, optimizer, *batches(1)[0])
    with pytest.warns(UserWarning, match="the script ends inside a merge window"):
        current().close()


def ends_apart(then):
    return ends({"localsgd": {"k_steps": 2}}, 4, then=_flush if then else _nothing)


def _flush(model, optimizer):
    fleet.flush()


def _nothing(model, optimizer):
    pass


def test_parameters_that_are_not_averaged_at_the_end_are_told(ranks):
    first, second = ranks.run(ends_apart, False)
    assert first == [
        "the script ends while the ranks have different parameters, because localsgd has not averaged them for 1 "
        "round. Call fleet.flush() at the end of the data"
    ]
    assert second == []  # once is enough
    assert ranks.run(ends_apart, True) == [[], []]


# --- a second optimizer ----------------------------------------------------------------------------
ALL_OF_THEM = [{"clip": True}, {"gradient_merge": {"k_steps": 2}}, {"amp": {"dtype": "float16"}},
               {"localsgd": {"allow_single": True}}, {"dgc": {"allow_single": True}}, {"sharding": True}]  # fmt: skip


@pytest.mark.parametrize("settings", ALL_OF_THEM, ids=lambda s: next(iter(s)))
def test_parameters_of_a_second_optimizer_are_an_error_where_the_strategy_would_leave_them_out(settings):
    first = lambda model: torch.optim.SGD(model[:3].parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    with pytest.raises(StrategyError, match=r"2 trainable parameters are not in the optimizer \(4.weight, 4.bias\)"):
        build(settings, optimizer=first)


def two_optimizers():
    model = net()
    second = torch.optim.Adam(model[4].parameters(), lr=0.01)
    fleet.init()
    model, first = fleet.distribute(model, torch.optim.SGD(model[:3].parameters(), lr=0.1))
    for x, y in share(batches(), fleet.worker_index(), fleet.worker_num()):
        step_both(model, (first, second), x, y)
    return weights(model)


def step_both(model, optimizers, x, y):
    mse_loss(model(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_a_second_optimizer_works_with_data_parallelism(ranks):
    model = net()
    both = torch.optim.SGD(model[:3].parameters(), lr=0.1), torch.optim.Adam(model[4].parameters(), lr=0.01)
    for x, y in batches():
        step_both(model, both, x, y)
    for found in ranks.run(two_optimizers):
        assert_close(found, weights(model))


# --- what one rank does alone ----------------------------------------------------------------------
def extra_forward(first):
    """Two models, as in a GAN; rank 0 alone looks at what they do, with gradients."""
    model, optimizer = build({})
    other, second = build({}, optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.01))
    for i, (x, y) in enumerate(share(batches(), fleet.worker_index(), 2)):
        zero_last(model, optimizer, x, y)
        if i == first and fleet.worker_index() == 0:
            (g,) = torch.autograd.grad(other(model(x.requires_grad_())[:, :1].expand(-1, 6)).sum(), x)
            assert g.any()
        zero_last(other, second, x, y)
    return weights(model), weights(other)


@pytest.mark.parametrize("first", [0, 3])
def test_one_rank_may_run_a_forward_with_gradients_alone(ranks, first):
    found = ranks.run(extra_forward, first)
    for mine in found:
        assert_close(mine[0], train(batches()))
        assert_close(mine[1], train(batches(), optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.01)))


def alone(what, folder):
    """Rank 0 calls fleet.save; rank 1 does something else."""
    model, optimizer = build({"gradient_merge": {"k_steps": 2}} if what == "merges" else {})
    x, y = batches(1)[0]
    zero_last(model, optimizer, x, y)
    said = ""
    try:
        if fleet.worker_index() == 0:
            fleet.save(folder)
        elif what == "loads":
            fleet.load(folder)
    except UsageError as error:
        said = str(error)
    zero_last(model, optimizer, x, y)  # where rank 1 waits for rank 0
    return said


@pytest.mark.parametrize("what", ["trains", "merges"])
def test_a_checkpoint_that_one_rank_alone_saves_is_an_error_within_seconds(ranks, tmp_path, what):
    said, _ = ranks.run(alone, what, tmp_path / "here")
    assert said == (
        "rank 0 is in fleet.save, but rank 1 has continued training: every rank must call fleet.save, so do not "
        "call it under `if fleet.is_first_worker()`"
    )


def test_ranks_in_different_calls_are_named(ranks, tmp_path):
    first, second = ranks.run(alone, "loads", tmp_path / "here")
    assert first == "rank 0 is in fleet.save, but rank 1 is in fleet.load: every rank must make the same calls in order"
    assert (
        second == "rank 1 is in fleet.load, but rank 0 is in fleet.save: every rank must make the same calls in order"
    )


def together(folder):
    model, optimizer = build({})
    for i, (x, y) in enumerate(batches(4)):
        zero_last(model, optimizer, x, y)
        if i == 2 * fleet.worker_index():  # one rank may do more than the others in between
            model(x)
        fleet.save(folder)
    fleet.load(folder)
    return True


def test_checkpoints_that_all_ranks_save_are_no_error(ranks, tmp_path):
    assert ranks.run(together, tmp_path / "here") == [True, True]


def gan(freeze):
    """The generator trains through a discriminator that merges its steps."""
    fleet.init()
    judge, maker = net(), torch.nn.Linear(6, 6)
    judge, optimizer = fleet.distribute(judge, sgd(judge), fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))
    other = sgd(maker)
    for _ in range(4):
        x, y = torch.randn(4, 6), torch.randn(4, 3)
        optimizer.zero_grad()
        (mse_loss(judge(x), y) + mse_loss(judge(maker(x).detach()), y)).backward()
        optimizer.step()
        if freeze:
            judge.requires_grad_(False)
        other.zero_grad()
        mse_loss(judge(maker(x)), y).backward()
        other.step()
        judge.requires_grad_(True)


def test_a_gan_under_merge_is_told_to_freeze_the_discriminator():
    with pytest.raises(UsageError, match=r"as in a GAN, call requires_grad_\(False\) on this one"):
        gan(freeze=False)
    forget()
    gan(freeze=True)


# --- a norm that is only measured -------------------------------------------------------------------
def measuring(model, optimizer, x, y):
    """As the Trainer of transformers does in every step."""
    mse_loss(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    optimizer.step()
    optimizer.zero_grad()


MEASURED = [{}, {"gradient_merge": {"k_steps": 2}}, {"amp": {"dtype": "float16"}}, {"sharding": True}]


def measured(settings):
    return [
        {n: local(t) for n, t in train_fleet(batches(), settings, loop=loop).items()} for loop in (measuring, zero_last)
    ]


@pytest.mark.parametrize("settings", MEASURED, ids=str)
def test_a_norm_may_be_measured_under_every_strategy(ranks, settings):
    assert_equal(*measured(settings))
    for pair in ranks.run(measured, settings):
        assert_equal(*pair)


@pytest.mark.parametrize("settings", [{"gradient_merge": {"k_steps": 3}}, {"amp": {"dtype": "float16"}}], ids=str)
def test_the_norm_that_is_measured_is_that_of_the_gradient_that_will_be_used(settings):
    model, optimizer = build(settings)
    plain, norms = net(), []
    for steps, (x, y) in enumerate(batches(2), start=1):
        mse_loss(model(x), y).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))
        if "amp" in settings:
            plain.load_state_dict(model.state_dict())
            plain.zero_grad()
        mse_loss(plain(x), y).backward()
        divisor = 1 if "amp" in settings else steps
        want = torch.nn.utils.get_total_norm([p.grad / divisor for p in plain.parameters()])
        torch.testing.assert_close(norms[-1], want, rtol=5e-3, atol=0)
        optimizer.step()
        if "amp" in settings:  # not scaled any more
            after = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            torch.testing.assert_close(after, norms[-1])
        optimizer.zero_grad()


def norm_of_shards():
    model, _ = build({"amp": {"dtype": "float16"}, "sharding": True})
    x, y = batches(1)[0]
    mse_loss(model(x), y).backward()
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).full_tensor()
    plain = net()
    mse_loss(plain(x), y).backward()
    return found, torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])


def test_so_is_the_norm_of_shards(ranks):
    for found, want in ranks.run(norm_of_shards):
        torch.testing.assert_close(found, want, rtol=5e-3, atol=0)


def test_gradients_with_different_scales_have_no_norm():
    (scaled, _), (plain, _) = build({"amp": {"dtype": "float16"}}), build({})
    x, y = batches(1)[0]
    for model in (scaled, plain):
        mse_loss(model(x), y).backward()
    with pytest.raises(UsageError, match="different loss scales"):
        torch.nn.utils.clip_grad_norm_([*scaled.parameters(), *plain.parameters()], math.inf)


def test_a_load_between_backward_and_step_is_named():
    model, optimizer = build({"amp": {"dtype": "float16"}})
    x, y = batches(1)[0]
    saved = optimizer.state_dict()
    mse_loss(model(x), y).backward()
    optimizer.load_state_dict(saved)
    with pytest.raises(UsageError, match=r"load_state_dict\(\) was called between backward\(\) and step\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    zero_last(model, optimizer, x, y)


def test_a_clip_by_hand_is_still_an_error_and_so_is_a_change_before_a_measurement():
    def clips(model, optimizer, x, y):
        mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()

    def changes(model, optimizer, x, y):
        mse_loss(model(x), y).backward()
        next(model.parameters()).grad.mul_(2)
        torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()

    for loop in (clips, changes):
        with pytest.raises(UsageError, match=r"a gradient was changed .* call clip_grad_norm_ with math.inf"):
            train_fleet(batches(), {"gradient_merge": {"k_steps": 2}}, loop=loop)
        forget()


def test_torch_has_its_own_function_again_after_release():
    from torch.nn.utils import clip_grad

    from fleetx.engine.guests import _clip as plain

    gc.collect()  # models of other tests
    model, _ = build({"gradient_merge": {"k_steps": 2}})
    assert clip_grad._clip_grads_with_norm_ is not plain
    fleet.release(model)
    assert clip_grad._clip_grads_with_norm_ is plain
