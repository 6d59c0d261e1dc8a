"""Loops and models that people write, each either exact or refused with a reason."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn.functional import mse_loss

from fleetx import NumbersError, StrategyError, UsageError, fleet
from fleetx.comm.session import current
from training import (
    Lazy,
    assert_close,
    assert_equal,
    batches,
    big,
    net,
    sgd,
    share,
    train,
    train_fleet,
    weights,
    zero_last,
)

FP16 = {"amp": {"init_loss_scaling": 8.0}}
MERGE = {"gradient_merge": {"k_steps": 2}}


def armed(declared=None, *, make=net, optimizer=sgd):
    fleet.init()
    model = make()
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**(declared or {})))


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


# --- several forwards and backwards in one step ---------------------------------------------------
def two_forwards_two_backwards(model, optimizer, x, y):
    half = len(x) // 2
    a, b = mse_loss(model(x[:half]), y[:half]) / 2, mse_loss(model(x[half:]), y[half:]) / 2
    a.backward()
    b.backward()
    optimizer.step()
    optimizer.zero_grad()


def one_forward_two_backwards(model, optimizer, x, y):
    loss = mse_loss(model(x), y) / 2
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def two_losses_of_one_output(model, optimizer, x, y):
    out = model(x)
    (mse_loss(out, y) * 0.25).backward(retain_graph=True)
    (mse_loss(out, y) * 0.75).backward()
    optimizer.step()
    optimizer.zero_grad()


LOOPS = [two_forwards_two_backwards, one_forward_two_backwards, two_losses_of_one_output]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_every_backward_of_a_step_is_reduced(ranks, loop):
    """DDP itself reduces only the first of them, and the ranks part without a word."""
    found = ranks.run(_train, {}, loop)
    assert_equal(found[0], found[1])
    assert_close(found[0], train(batches()))
    merged = ranks.run(_train, MERGE, loop)
    assert_equal(merged[0], merged[1])
    assert_close(merged[0], train(big(batches(), 2)))


def _train(declared, loop):
    return train_fleet(batches(), declared, loop=loop)


def test_forwards_of_a_whole_window_before_its_backwards_are_reduced_too(ranks):
    found = ranks.run(_forwards_first)
    assert_equal(found[0], found[1])
    assert_close(found[0], train(big(batches(), 2)))


def _forwards_first():
    model, optimizer = armed(MERGE)
    data = share(batches(), fleet.worker_index(), 2)
    for (x, y), (a, b) in zip(data[::2], data[1::2], strict=True):
        losses = [mse_loss(model(x), y), mse_loss(model(a), b)]
        for loss in losses:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def test_a_second_backward_with_unused_parameters_is_refused(ranks):
    for message in ranks.run(_second_backward_unused):
        assert "with find_unused_parameters, a forward can have only one backward" in message


def _second_backward_unused():
    model, _ = armed({"find_unused_parameters": True}, make=Lazy)
    x, y = batches(1)[0]
    loss = mse_loss(model(x), y)
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except UsageError as error:
        return str(error)
    return ""


def test_a_backward_that_failed_is_named_when_training_goes_on(ranks):
    for message in ranks.run(_fail_and_go_on):
        assert "the previous backward did not finish its reduction" in message


def _fail_and_go_on():
    model, optimizer = armed({"fuse_grad_size_in_MB": 0.0005})
    x, y = batches(1)[0]
    zero_last(model, optimizer, x, y)
    handle = model[2].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mse_loss(model(x), y).backward()
    handle.remove()
    optimizer.zero_grad()
    try:
        zero_last(model, optimizer, x, y)
    except UsageError as error:
        return str(error)
    return ""


# --- chains, recursion, outputs and inputs in fp16 ------------------------------------------------
def _moved(model, before):
    return {k: before[k] - v for k, v in weights(model).items()}


def _near(a, b):
    torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-4)


def test_a_model_in_front_of_a_scaled_model_gets_its_true_gradient():
    """A GAN's generator, scaled itself or not, and the gradient of an input."""
    fleet.init()
    strategy = fleet.DistributedStrategy(**FP16)
    plain = nn.Linear(4, 6), nn.Linear(6, 3)
    scaled = nn.Linear(4, 6), nn.Linear(6, 3)
    for a, b in zip(plain, scaled, strict=True):
        b.load_state_dict(a.state_dict())
    (g, og), (d, _) = [fleet.distribute(m, plain_sgd(m), strategy) for m in scaled]
    z = torch.randn(5, 4, requires_grad=True)
    w = z.detach().clone().requires_grad_()
    d(g(z)).sum().backward()
    plain[1](plain[0](w)).sum().backward()
    before = weights(g)
    og.step()
    _near(_moved(g, before), {k: p.grad for k, p in plain[0].named_parameters()})
    _near(z.grad, w.grad)


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x, depth=2):
        x = self.layer(x)
        return self(x, depth - 1) if depth else x


class ReturnsParameter(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.temperature = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.layer(x), self.temperature


def _recursive_loss(model, x):
    return model(x).square().mean()


def _parameter_loss(model, x):
    out, temperature = model(x)
    return (out * temperature).square().mean()


def _in_place_loss(model, x):
    out, temperature = model(x)
    out[:, 0] = 0
    return (out * temperature).square().mean()


@pytest.mark.parametrize(
    ("make", "loss"),
    [(Recursive, _recursive_loss), (ReturnsParameter, _parameter_loss), (ReturnsParameter, _in_place_loss)],
)
def test_whatever_a_model_returns_is_scaled_once(make, loss):
    x = torch.randn(5, 4)
    model, optimizer = armed(FP16, make=make, optimizer=plain_sgd)
    before = weights(model)
    loss(model, x).backward()
    optimizer.step()
    plain = make()
    loss(plain, x).backward()
    _near(_moved(model, before), {k: p.grad for k, p in plain.named_parameters()})


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return Normal(self.layer(x), 1.0)


def test_an_object_that_hides_its_tensors_is_refused_where_they_must_be_scaled():
    model, _ = armed(FP16, make=Actor)
    with pytest.raises(UsageError, match="returns a Normal, and the strategy cannot see the gradient of its loc"):
        model(torch.randn(3, 4))
    model, optimizer = armed(make=Actor)
    (-model(torch.randn(3, 4)).log_prob(torch.zeros(3, 2)).sum()).backward()
    optimizer.step()


def test_forward_backward_scales_a_loss_that_reads_parameters():
    model, optimizer = armed(FP16, optimizer=plain_sgd)
    before = weights(model)
    x, y = batches(1)[0]
    fleet.forward_backward(
        x, y, loss_fn=lambda o, t: mse_loss(o, t) + sum(p.square().sum() for p in model.parameters())
    )
    optimizer.step()
    plain = net()
    (mse_loss(plain(x), y) + sum(p.square().sum() for p in plain.parameters())).backward()
    _near(_moved(model, before), {k: p.grad for k, p in plain.named_parameters()})


def test_gradients_of_gradients_pass_through():
    model, _ = armed(FP16)
    x = torch.randn(3, 6, requires_grad=True)
    (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), x)
    plain = net()
    (pg,) = torch.autograd.grad(plain(x).square().sum(), x, create_graph=True)
    (ph,) = torch.autograd.grad(pg.square().sum(), x)
    torch.testing.assert_close((g, h), (pg, ph), rtol=0.05, atol=0.05)


def _penalty(backward):
    torch.manual_seed(1)
    x = torch.randn(3, 6, requires_grad=True)

    def step(model, optimizer):
        out = model(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        backward(out.mean() * 1e-3 + (g.norm(dim=1) - 1).square().mean())
        optimizer.step()

    return step


def test_a_loss_on_gradients_goes_through_fleet_backward_in_fp16():
    """On its way to the parameters the scale cancels out, so a plain backward is refused."""
    plain = net()
    _penalty(lambda loss: loss.backward())(plain, plain_sgd(plain))
    model, optimizer = armed(FP16, optimizer=plain_sgd)
    with pytest.raises(UsageError, match=r"create_graph=True.*call fleet.backward\(loss\)"):
        _penalty(lambda loss: loss.backward())(model, optimizer)
    model, optimizer = armed(FP16, optimizer=plain_sgd)
    _penalty(lambda loss: fleet.backward(loss, optimizer=optimizer))(model, optimizer)
    torch.testing.assert_close(weights(model), weights(plain), rtol=0.02, atol=0.02)


class WritesIntoItsArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x, aux, state):
        out = self.body(x)
        aux.append(out.square().mean())
        state["h"] = out.detach()
        return out


def test_a_model_may_write_into_its_arguments():
    model, _ = armed(FP16, make=WritesIntoItsArguments)
    aux, state = [], {}
    model(torch.randn(2, 6), aux, state)
    assert len(aux) == len(state) == 1


def test_torch_func_works_on_a_distributed_model():
    model, _ = armed(FP16)
    params = {k: v.detach() for k, v in model.named_parameters()}

    def loss(params, x):
        return torch.func.functional_call(model, params, (x,)).square().sum()

    assert set(torch.func.grad(loss)(params, torch.randn(3, 6))) == set(params)


# --- what a strategy cannot honour ----------------------------------------------------------------
def test_parameters_of_another_optimizer_are_refused_where_they_would_stay_unfinished():
    def only_the_first(model):
        return torch.optim.SGD(model[0].parameters(), lr=0.1)

    for declared in (FP16, MERGE, {"clip": True}):
        with pytest.raises(StrategyError, match=r"4 trainable parameters are not in the optimizer .*\(2.weight"):
            armed(declared, optimizer=only_the_first)


def test_a_parameter_that_joins_later_is_refused():
    model, optimizer = armed(MERGE)
    late = nn.Linear(3, 1)
    optimizer.add_param_group({"params": late.parameters()})
    late(model(torch.randn(2, 6))).sum().backward()
    with pytest.raises(UsageError, match=r"parameter \(1, 3\) became trainable after fleet.distribute and is not in"):
        optimizer.step()


def test_zero_grad_that_would_erase_a_window_is_refused():
    model, optimizer = armed(MERGE)
    x, y = batches(1)[0]
    zero_last(model, optimizer, x, y)
    mse_loss(model(x), y).backward()
    optimizer.zero_grad()  # to leave this batch out
    with pytest.raises(UsageError, match="erased gradients that earlier steps of this merge window had collected"):
        mse_loss(model(x), y).backward()


def test_erasing_in_place_between_two_backwards_is_refused_only_where_it_erases_earlier_steps():
    model, optimizer = armed(MERGE)
    x, y = batches(1)[0]
    mse_loss(model(x), y).backward()
    optimizer.zero_grad(set_to_none=False)  # the first of the window: nothing else is lost
    zero_last(model, optimizer, x, y)
    mse_loss(model(x), y).backward()
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(UsageError, match="changed between two backwards"):
        mse_loss(model(x), y).backward()


def test_clipping_between_two_backwards_is_refused_too():
    model, _ = armed(FP16)
    x, y = batches(1)[0]
    mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(UsageError, match="changed between two backwards"):
        mse_loss(model(x), y).backward()


def test_freezing_inside_of_a_window_is_refused():
    model, optimizer = armed(MERGE)
    x, y = batches(1)[0]
    zero_last(model, optimizer, x, y)
    model[4].bias.requires_grad_(False)
    with pytest.raises(UsageError, match=r"'4.bias' was frozen inside a merge window"):
        zero_last(model, optimizer, x, y)


def test_a_window_whose_last_step_has_no_backward_is_applied(ranks):
    """A bad batch is skipped, but step() is called: two steps, one gradient, divided by two."""
    found = ranks.run(_skip_the_last)
    assert_equal(found[0], found[1])
    model = net()
    optimizer = sgd(model)
    for x, y in batches(2):
        (mse_loss(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(found[0], weights(model))


def _skip_the_last():
    model, optimizer = armed(MERGE)
    for x, y in share(batches(2), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
        optimizer.step()
        assert fleet.updated
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("skipped", [(3,), (2, 3), (1, 3, 5)], ids=["the last", "all", "three windows"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"clip": {"clip_norm": 0.1}},
        {"dgc": True},
        {"fp16_allreduce": {"dtype": "bfloat16"}},
        {"localsgd": {"k_steps": 1}},
    ],
    ids=lambda m: "+".join(m),
)
def test_one_rank_may_leave_out_the_last_batch_of_a_window(ranks, skipped, more):
    """The others reduce during their backward; the rank without one must take part. Its gradient counts as zero."""
    found = ranks.run(_leave_out, skipped, more)
    assert_equal(found[0], found[1])
    if more.keys() & {"fp16_allreduce", "localsgd"}:
        return
    model = net()
    optimizer = sgd(model)
    data = [share(batches(), rank, 2) for rank in range(2)]
    for start in range(0, 8, 2):
        for i in (start, start + 1):
            for rank in range(2):
                if not (rank == 1 and i in skipped):
                    (mse_loss(model(data[rank][i][0]), data[rank][i][1]) / 4).backward()
        if "clip" in more:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(found[0], weights(model))


def _leave_out(skipped, more):
    model, optimizer = armed(MERGE | more)
    for i, (x, y) in enumerate(share(batches(), fleet.worker_index(), 2)):
        if not (fleet.worker_index() == 1 and i in skipped):
            mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert fleet.updated == (i % 2 == 1) or "localsgd" in more  # there, an empty window on a rank is no update
    return weights(model)


def test_a_window_in_which_no_rank_has_a_batch_updates_nothing(ranks):
    ranks.run(_empty_window)


def _empty_window():
    model, optimizer = armed(MERGE)
    for x, y in batches(2):
        zero_last(model, optimizer, x, y)
    before = weights(model)
    optimizer.step()
    optimizer.step()
    assert not fleet.updated
    assert_equal(before, weights(model))  # no momentum either


def test_a_rank_that_skips_a_batch_after_zeroing_in_place_keeps_the_clock(ranks):
    """Zeros that are left from the last update are no gradients, but the step counts on every rank."""
    found = ranks.run(_skip_on_one)
    assert_equal(found[0], found[1])


def _skip_on_one():
    model, optimizer = armed(MERGE)
    for i, (x, y) in enumerate(share(batches(), fleet.worker_index(), 2)):
        if not (i == 4 and fleet.worker_index() == 1):  # the first step of a window
            mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert optimizer.state_dict()["fleetx"]["round"] == 4
    return weights(model)


@pytest.mark.parametrize("optimizer", [sgd, plain_sgd])
def test_a_batch_that_is_skipped_at_rate_0_is_counted(ranks, optimizer):
    """The first steps of a warm-up have the rate 0; one rank skips a batch there, and the ranks must stay together."""
    found = ranks.run(_skip_at_rate_0, optimizer)
    assert_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == [False, True] * 4


def _skip_at_rate_0(make):
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, make(model), fleet.DistributedStrategy(**MERGE))
    updates = []
    for i, (x, y) in enumerate(share(batches(), fleet.worker_index(), 2)):
        optimizer.param_groups[0]["lr"] = 0.0 if i in (2, 3) else 0.1
        if not (i == 2 and fleet.worker_index() == 1):
            mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        updates.append(fleet.updated)
    return weights(model), updates


def test_a_checkpoint_between_backward_and_step_of_a_window_is_refused():
    model, optimizer = armed(MERGE)
    x, y = batches(1)[0]
    zero_last(model, optimizer, x, y)
    mse_loss(model(x), y).backward()
    with pytest.raises(UsageError, match="save after step"):
        optimizer.state_dict()


def test_gradients_of_inputs_are_no_training_backward():
    """An attack on the input before each step, as in adversarial training, in the middle of a merge window."""

    def loop(model, optimizer, x, y):
        x = x.clone().requires_grad_()
        torch.autograd.grad(mse_loss(model(x), y), x)
        mse_loss(model(x), y).backward(inputs=[x])
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_close(train_fleet(batches(), MERGE, loop=loop), train(big(batches(), 2)))


def test_a_forward_between_backward_and_step_changes_nothing(ranks):
    for declared in ({}, MERGE, FP16):
        found = ranks.run(_forward_between, declared)
        assert_equal(found[0], found[1])


def _forward_between(declared):
    def loop(model, optimizer, x, y):
        mse_loss(model(x), y).backward()
        model(x)
        optimizer.step()
        optimizer.zero_grad()

    return train_fleet(batches(), declared, loop=loop)


class Clip(nn.Module):
    """Its temperature is used past its output."""

    def __init__(self):
        super().__init__()
        self.body, self.temperature = net(), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.body(x)


def test_a_parameter_past_the_output_is_reduced(ranks):
    found = ranks.run(_past_the_output)
    assert_equal(found[0], found[1])
    model = Clip()
    optimizer = sgd(model)
    for x, y in batches():
        mse_loss(model(x) * model.temperature.exp(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(found[0], weights(model))


def _past_the_output():
    def loop(model, optimizer, x, y):
        mse_loss(model(x) * model.temperature.exp(), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train_fleet(batches(), {}, make=Clip, loop=loop)


def test_torch_distributed_checkpoint_may_ask_for_the_state_of_a_fresh_optimizer(ranks):
    """It steps with gradients of zero to make that state, which must count for nothing."""
    for declared in ({}, {**MERGE, **FP16}):
        assert ranks.run(_ask_for_state, declared) == [True, True]


def _ask_for_state(declared):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = armed(declared, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1))
    before = weights(model)
    get_optimizer_state_dict(model, optimizer)
    assert_equal(weights(model), before)
    return optimizer.state_dict()["fleetx"]["merged"] == 0


def test_one_gradient_may_be_taken_away_by_hand_inside_of_a_window():
    def loop(model, optimizer, x, y):
        mse_loss(model(x), y).backward()
        model[4].weight.grad = None  # freeze the last layer, as some recipes do in the first epoch
        optimizer.step()
        optimizer.zero_grad()

    found = train_fleet(batches(), MERGE, loop=loop)
    assert torch.equal(found["4.weight"], net()[4].weight)
    assert not torch.equal(found["4.bias"], net()[4].bias)


def test_a_frozen_model_in_a_chain_keeps_its_window():
    """A GAN's discriminator, frozen while the generator trains."""
    fleet.init()
    g, d = nn.Linear(4, 6), net()
    g, og = fleet.distribute(g, plain_sgd(g))
    d, od = fleet.distribute(d, plain_sgd(d), fleet.DistributedStrategy(**MERGE))
    data = batches()
    for x, y in data:
        zero_last(d, od, x, y)
        d.requires_grad_(False)
        d(g(torch.randn(2, 4))).sum().backward()
        og.step()
        og.zero_grad()
        od.zero_grad()
        d.requires_grad_(True)
    assert_close(weights(d), train(big(data, 2), optimizer=plain_sgd))


def test_flush_before_the_step_is_refused():
    model, optimizer = armed(MERGE)
    x, y = batches(1)[0]
    zero_last(model, optimizer, x, y)
    mse_loss(model(x), y).backward()
    with pytest.raises(UsageError, match=r"call it before fleet.flush"):
        fleet.flush()


@pytest.mark.parametrize(
    "ends", [lambda o: fleet.flush(optimizer=o), lambda _: fleet.release()], ids=["flush", "release"]
)
def test_what_another_models_backward_left_can_be_erased_instead_of_applied(ends):
    discriminator, optimizer = armed(MERGE)
    discriminator(nn.Linear(4, 6)(torch.randn(2, 4))).sum().backward()
    with pytest.raises(
        UsageError, match=r"call it .*before fleet.*in a GAN, call zero_grad\(\) of this optimizer instead"
    ):
        ends(optimizer)
    optimizer.zero_grad()
    ends(optimizer)


@pytest.mark.parametrize("ends", [fleet.flush, fleet.release], ids=["flush", "release"])
def test_inside_a_merge_window_it_cannot_be_erased_any_more(ends):
    model, optimizer = armed(MERGE)
    x, y = batches(1)[0]
    zero_last(model, optimizer, x, y)
    mse_loss(model(x), y).backward()
    with pytest.raises(UsageError, match=r"as in a GAN, call requires_grad_\(False\) on this one"):
        ends()


class TwiceAStep(torch.optim.SGD):
    """Evaluates its closure twice, as SAM does."""

    def step(self, closure=None):
        closure()
        return super().step(closure)


@pytest.mark.parametrize("factor", [1, 3])
def test_the_rates_of_a_branch_are_scaled_once_around_a_closure(factor):
    """`fleetx batch` scales the rates. Without a strategy, the optimizer calls the closure inside its own step."""
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy())
    (engine,) = current().entries
    engine.rates.factor = factor
    reference = net()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1 * factor)
    for x, y in batches(2):
        for net_, o in ((model, optimizer), (reference, plain)):

            def closure(net_=net_, o=o, x=x, y=y):
                loss = mse_loss(net_(x), y)
                o.zero_grad(set_to_none=False)
                loss.backward()
                return loss

            o.step(closure)
    assert_close(weights(model), weights(reference))


def test_a_closure_that_is_called_twice_is_refused_unless_there_is_nothing_to_do():
    def run(declared):
        model, optimizer = armed(declared, optimizer=lambda m: TwiceAStep(m.parameters(), lr=0.1))
        x, y = batches(1)[0]

        def closure():
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    run({})
    with pytest.raises(UsageError, match="TwiceAStep calls its closure more than once"):
        run({"clip": True})


class Chatty(torch.optim.SGD):
    """Does nothing but call its parent, whose hooks are then passed a second time."""

    def step(self, closure=None):
        return super().step(closure)


def test_an_optimizer_that_calls_its_parents_step_counts_once():
    chatty = train_fleet(batches(), MERGE, optimizer=lambda m: Chatty(m.parameters(), lr=0.1, momentum=0.9))
    assert_equal(chatty, train_fleet(batches(), MERGE))


class Restless(torch.optim.SGD):
    """Decays weights whether or not there is a gradient."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)
        return super().step(closure)


def test_an_optimizer_that_moves_without_gradients_is_found_out():
    model, optimizer = armed(MERGE, optimizer=lambda m: Restless(m.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="Restless changes parameters that have no gradient"):
        zero_last(model, optimizer, *batches(1)[0])


def test_a_gradient_that_was_replaced_is_noticed():
    model, optimizer = armed(FP16)
    x, y = batches(1)[0]
    mse_loss(model(x), y).backward()
    model[0].weight.grad = model[0].weight.grad.clamp(-1, 1)
    with pytest.raises(UsageError, match="changed between backward"):
        optimizer.step()


@pytest.mark.parametrize(
    ("saved_with", "loaded_with", "message"),
    [
        (MERGE, {}, "gradients are summed; with this strategy they would be plain"),
        ({**MERGE, **FP16}, MERGE, "gradients are scaled and summed; with this strategy they would be summed"),
        (MERGE, {**MERGE, **FP16}, "gradients are summed; with this strategy they would be scaled and summed"),
    ],
)
@pytest.mark.filterwarnings("ignore:the checkpoint has state of `amp`")
def test_a_window_is_not_continued_under_another_strategy(saved_with, loaded_with, message):
    model, optimizer = armed(saved_with)
    zero_last(model, optimizer, *batches(1)[0])
    saved = optimizer.state_dict()
    _, other = armed(loaded_with)
    with pytest.raises(UsageError, match=message):
        other.load_state_dict(saved)
    assert other.state_dict()["fleetx"]["merged"] == 0


def test_a_checkpoint_that_torch_refuses_changes_nothing():
    model, optimizer = armed(MERGE)
    zero_last(model, optimizer, *batches(1)[0])
    saved = optimizer.state_dict()
    saved["param_groups"] = []
    _, other = armed(MERGE)
    with pytest.raises(ValueError, match="parameter group"):
        other.load_state_dict(saved)
    assert other.state_dict()["fleetx"]["merged"] == 0


def test_a_wrapped_model_is_refused():
    with pytest.raises(StrategyError, match="wrapped in DataParallel, which fleetx replaces"):
        armed(make=lambda: nn.DataParallel(net()))


def test_a_failed_distribute_leaves_the_model_as_it_was(monkeypatch):
    from fleetx.engine.engine import Engine

    monkeypatch.setattr(Engine, "_make_reducer", lambda self: 1 / 0)
    model = net()
    fleet.init()
    strategy = fleet.DistributedStrategy(recompute={"checkpoints": ["0"]})
    with pytest.raises(ZeroDivisionError):
        fleet.distribute(model, sgd(model), strategy)
    assert "forward" not in vars(model[0])
    assert not model._forward_hooks


def test_updated_is_that_of_the_last_step_of_any_optimizer():
    fleet.init()
    (a, oa), (b, ob) = [
        fleet.distribute(m, sgd(m), s) for m, s in ((net(), fleet.DistributedStrategy(**MERGE)), (net(), None))
    ]
    x, y = batches(1)[0]
    told = []
    for model, optimizer in ((a, oa), (b, ob), (a, oa)):
        zero_last(model, optimizer, x, y)
        told.append(fleet.updated)
    assert told == [False, True, True]


# --- gradients that train nothing -----------------------------------------------------------------
def _func_grad(model, x):
    def loss(params):
        return torch.func.functional_call(model, params, (x,)).square().mean()

    return list(torch.func.grad(loss)({k: v.detach() for k, v in model.named_parameters()}).values())


def _of_an_activation(model, x):
    """As Grad-CAM does."""
    kept = []
    handle = model[1].register_forward_hook(lambda module, args, out: kept.append(out))
    out = model(x).square().mean()
    handle.remove()
    return list(torch.autograd.grad(out, kept))


def _of_an_activation_and_an_input(model, x):
    """In one call."""
    kept, x = [], x.clone().requires_grad_()
    handle = model[1].register_forward_hook(lambda module, args, out: kept.append(out))
    out = model(x * 2).square().mean()
    handle.remove()
    return list(torch.autograd.grad(out, [*kept, x]))


def _of_two_inputs(model, x):
    """Without the scale, gradients as small as these would vanish in float16."""
    x = x.clone().requires_grad_()
    doubled = x * 2
    return [g * 1e5 for g in torch.autograd.grad(model(doubled).square().mean() * 1e-5, [doubled, x])]


def _of_an_input(model, x):
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(model(x * 2).square().mean(), x))


def _through_a_frozen_model(model, x):
    """As a GAN's generator learns. Without the scale, gradients as small as these would vanish in float16."""
    x = x.clone().requires_grad_()
    model.requires_grad_(False)
    (model(x * 2).square().mean() * 1e-5).backward()
    model.requires_grad_(True)
    return [x.grad * 1e5]


READS = [
    _func_grad,
    _of_an_activation,
    _of_an_activation_and_an_input,
    _of_an_input,
    _of_two_inputs,
    _through_a_frozen_model,
]


@pytest.mark.parametrize("read", READS)
def test_a_gradient_that_trains_nothing_is_not_scaled(read):
    model, _ = armed({"amp": {"dtype": "float16"}})
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    for found, want in zip(read(model, x), read(net(), x), strict=True):
        torch.testing.assert_close(found.float(), want, rtol=0.02, atol=1e-3 * want.abs().max().item())


# --- what is not scaled or summed like the rest ------------------------------------------------------
def _penalty_on_weights(model, x):
    return model(x).square().mean() + sum(p.square().sum() for p in model.parameters())


def _activation(model, x):
    kept = []
    handle = model[1].register_forward_hook(lambda module, args, out: kept.append(out))
    out = model(x)
    handle.remove()
    return out.square().mean() + kept[0].mean()


def _module_alone(model, x):
    return model(x).square().mean() + model[0](x).mean()


@pytest.mark.parametrize("loss", [_penalty_on_weights, _activation, _module_alone])
@pytest.mark.parametrize(("declared", "word"), [({"amp": True}, "scaled"), (MERGE, "weighted")], ids=["fp16", "weight"])
def test_a_loss_that_would_be_scaled_only_in_part_is_refused(loss, declared, word):
    model, optimizer = armed(declared)
    x = batches(1)[0][0]
    if word == "weighted":
        fleet.weight(4)
    computed = loss(model, x)
    with pytest.raises(UsageError, match=f"so that part of its gradient would not be {word}: call fleet"):
        computed.backward()
    optimizer.zero_grad()
    fleet.backward(loss(model, x))
    optimizer.step()


@pytest.mark.parametrize("call", [lambda model, x: model.forward(x), lambda model, x: model[4](model[:4](x))])
def test_a_forward_that_the_strategy_cannot_see_is_refused(call):
    model, optimizer = armed({"amp": {"dtype": "bfloat16"}})
    x, y = batches(1)[0]
    mse_loss(call(model, x), y).backward()
    with pytest.raises(UsageError, match=r"which was never called, so the strategy did not act on the forward: call"):
        optimizer.step()


def test_a_loss_behind_another_model_is_no_loss_in_part():
    first, _ = armed({"amp": {"dtype": "float16"}})
    second = nn.Sequential(*(nn.Linear(3, 3) for _ in range(100)))
    second(first(batches(1)[0][0])).square().mean().backward()
    assert first[0].weight.grad is not None


@pytest.mark.parametrize(
    "declared", [{"amp": {"dtype": "float16"}}, {"gradient_merge": {"k_steps": 2}}], ids=["fp16", "merge"]
)
def test_gradients_of_the_last_update_that_are_still_there_are_refused(declared):
    """Plain PyTorch adds to them. Here they would count for less than what is added."""
    model, optimizer = armed(declared)
    (x, y), updated = batches(1)[0], False
    while not updated:
        mse_loss(model(x), y).backward()
        optimizer.step()
        updated = fleet.updated
    mse_loss(model(x), y).backward()
    with pytest.raises(UsageError, match=r"were not cleared.*: call optimizer.zero_grad\(\) after each step"):
        optimizer.step()


def _dgc(change):
    """A matrix that dgc acts on, whose p.grad contains momentum after a backward."""
    fleet.init()
    torch.manual_seed(0)
    model = nn.Linear(128, 128)
    strategy = fleet.DistributedStrategy(dgc={"sparsity": [0.0], "rampup_begin_step": 0})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    model(torch.randn(4, 128)).square().mean().backward()
    optimizer.step()
    if change == "clip":
        optimizer.zero_grad()
    model(torch.randn(4, 128)).square().mean().backward()
    if change == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(UsageError, match=CHANGES[change]):
        optimizer.step()


CHANGES = {"clip": r"or contains momentum \(dgc\)", "no zero_grad": r"were not cleared"}


@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_with_momentum_is_not_the_users_to_change(ranks, change):
    ranks.run(_dgc, change)


def test_a_discriminator_may_erase_what_the_generator_added():
    model, optimizer = armed({"amp": {"dtype": "float16"}})
    for x, y in batches(3):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        model(x * 2).mean().backward()
    assert fleet.updated


def test_steps_of_one_batch_may_add_up_as_in_plain_pytorch():
    def loop(model, optimizer, x, y):
        mse_loss(model(x), y).backward()
        optimizer.step()

    assert_equal(train_fleet(batches(4), {"gradient_merge": {"k_steps": 1}}, loop=loop), train(batches(4), loop=loop))


# --- a closure where no strategy is active --------------------------------------------------------
@pytest.mark.filterwarnings("ignore:step 1. the gradient of")
@pytest.mark.parametrize("kind", [torch.optim.SGD, TwiceAStep])
def test_a_closure_with_a_gradient_that_is_not_finite_changes_nothing(kind):
    model, optimizer = armed({}, optimizer=lambda m: kind(m.parameters(), lr=0.1))
    x, y = batches(1)[0]
    before, factors, updated = weights(model), {0: math.nan}, []

    def closure():
        optimizer.zero_grad()
        loss = mse_loss(model(x), y) * factors.get(len(updated), 1)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        updated.append(fleet.updated)
        if not updated[-1]:
            assert_equal(weights(model), before)
    assert updated == [False, True]
    plain = net()
    mse_loss(plain(x), y).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_equal(weights(model), weights(plain))


# --- what a backward does not reach, and what parts the ranks ---------------------------------------------
def backward_beside_the_model(declared):
    """Another backward in the same step, through one of the model's modules."""
    fleet.init()
    model = net()
    model, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    try:
        for x, y in share(batches(3), fleet.worker_index(), 2):
            mse_loss(model(x), y).backward()
            model[0](x).square().mean().backward()
            o.step()
            o.zero_grad()
    except (NumbersError, UsageError) as error:
        return fleet.updated, str(error)
    return None


@pytest.mark.parametrize("declared", [{}, {"clip": {"clip_norm": 0.1}}, {"gradient_merge": {"k_steps": 2}}], ids=str)
def test_a_second_backward_that_is_not_reduced_is_found_in_the_first_update(ranks, declared):
    for updated, message in ranks.run(backward_beside_the_model, declared):
        if "gradient_merge" in declared:  # before it
            assert not updated
            assert "a gradient was changed between backward() and step()" in message
        else:
            assert "differ from the others, first in '0.weight', after 1 update. The script may have changed" in message
            assert "with a backward() that does not go through what model(x) returned" in message


def backward_to_the_last_layer(declared):
    fleet.init()
    model = net()
    model, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    x, y = batches(1)[0]
    mse_loss(model(x), y).backward(inputs=list(model[4].parameters()))
    with pytest.raises(UsageError) as error:
        o.step()
    return str(error.value)


@pytest.mark.parametrize("declared", [{}, {"find_unused_parameters": True}], ids=str)
def test_a_backward_that_leaves_parameters_out_is_told_to_freeze_them(ranks, declared):
    for message in ranks.run(backward_to_the_last_layer, declared):
        assert "freeze it before the forward (instead of backward(inputs=...))" in message
        assert ("set strategy.find_unused_parameters" in message) == (not declared)
