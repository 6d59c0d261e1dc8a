from __future__ import annotations

import copy
import io
from collections import deque

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import StrategyError, fleet
from training import (
    adam,
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


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def mean_of(results):
    return {k: torch.stack([r[k] for r in results]).mean(0) for k in results[0]}


def build(declared, *, make=net, optimizer=sgd):
    fleet.init()
    model = make()
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))


def train_plain(data, declared):
    return train_fleet(data, declared, optimizer=plain_sgd)


def test_a_period_of_one_with_plain_sgd_is_data_parallelism(ranks):
    expected = train(batches(), optimizer=plain_sgd)
    for got in ranks.run(train_plain, batches(), {"localsgd": True}):
        assert_close(got, expected)


def reference(data, size, k, begin, *, lr=0.1, momentum=0.9, outer_lr=1.0, outer_momentum=0.0):
    """Plain PyTorch in float64: train each rank in turn, and average by hand."""
    models = [net().double() for _ in range(size)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=lr, momentum=momentum) for m in models]
    anchor = [p.detach().clone() for p in models[0].parameters()]
    outer = [torch.zeros_like(a) for a in anchor]
    last = 0
    for step, (x, y) in enumerate(data, start=1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            zero_last(model, optimizer, x.double().chunk(size)[rank], y.double().chunk(size)[rank])
        if step <= begin or step - last >= k:
            last = step
            for i, params in enumerate(zip(*(m.parameters() for m in models), strict=True)):
                with torch.no_grad():
                    d = anchor[i] - torch.stack(list(params)).mean(0)
                    outer[i] = outer_momentum * outer[i] + d
                    anchor[i] = anchor[i] - outer_lr * (d + outer_momentum * outer[i])
                    for p in params:
                        p.copy_(anchor[i])
    return [{k: v.float() for k, v in weights(m).items()} for m in models]


@pytest.mark.parametrize(("k", "begin"), [(2, 1), (3, 2), (4, 4)])
def test_it_equals_plain_pytorch_in_float64(ranks, k, begin):
    declared = {"localsgd": {"k_steps": k, "begin_step": begin}}
    for got, expected in zip(
        ranks.run(train_fleet, batches(), declared), reference(batches(), 2, k, begin), strict=True
    ):
        assert_close(got, expected)


def test_the_outer_optimizer_equals_plain_pytorch_in_float64(ranks):
    outer = {"outer_lr": 0.7, "outer_momentum": 0.5}
    declared = {"localsgd": {"k_steps": 2, **outer}}
    for got, expected in zip(
        ranks.run(train_fleet, batches(), declared), reference(batches(), 2, 2, 1, **outer), strict=True
    ):
        assert_close(got, expected)


def count_calls(declared, rounds):
    """The bytes of each collective."""
    model, optimizer = build(declared)
    network = fleet._engine(model).network
    calls, real = [], network.sum
    network.sum = lambda buffer, number=0: (calls.append(buffer.numel() * 4), real(buffer, number))[1]
    for x, y in share(batches(rounds), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
    return calls


def test_backward_sends_nothing_and_an_average_is_one_flat_bucket(ranks):
    size = sum(p.numel() for p in net().parameters()) * 4
    for calls in ranks.run(count_calls, {"localsgd": {"k_steps": 4}}, 9):
        assert calls == [size] * 3  # rounds 1, 5 and 9


def drift(declared, make=net):
    """The weights after each round."""
    model, optimizer = build(declared, make=make)
    out = []
    for x, y in share(batches(6), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
        out.append(weights(model))
    return out


@pytest.mark.parametrize("momentum", [False, True])
def test_ranks_are_equal_after_an_average_and_differ_in_between(ranks, momentum):
    a, b = ranks.run(drift, {"localsgd": {"k_steps": 3, "average_momentum": momentum}})
    equal = [all(torch.equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True)]
    assert equal == [True, False, False, True, False, False]


def test_averaged_momentum_with_a_period_of_one_is_data_parallelism(ranks):
    expected = train(batches())
    for got in ranks.run(train_fleet, batches(), {"localsgd": {"average_momentum": True}}):
        assert_close(got, expected)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("averaged", [False, True])
def test_statistics_of_batch_norm(ranks, averaged):
    results = ranks.run(drift, {"localsgd": {"k_steps": 2, "average_buffers": averaged}}, Normed)
    after, before = ([r[i]["body.1.running_mean"] for r in results] for i in (2, 1))
    assert torch.equal(*after)
    assert not torch.equal(*before)


@pytest.mark.parametrize(
    "others",
    [
        {"gradient_merge": {"k_steps": 2}},
        {"lars": {"lars_coeff": 0.02}},
        {"amp": {"dtype": "bfloat16"}},
        {"amp": {"init_loss_scaling": 1024.0}},
        {"recompute": {"checkpoints": ["0", "2"]}},
        {"clip": {"clip_norm": 0.1}},
        {"use_hierarchical_allreduce": True},
    ],
    ids=str,
)
def test_between_averages_each_rank_trains_as_if_alone(ranks, others):
    """Averaged only in round 1, and both ranks have the same data: exactly what one rank does alone."""
    data = batches(4)
    same = [(torch.cat([x, x]), torch.cat([y, y])) for x, y in data]
    alone = train_fleet(data, others)
    for got in ranks.run(train_fleet, same, others | {"localsgd": {"k_steps": 100}}):
        assert_close(got, alone)


def test_with_lamb(ranks):
    for got in ranks.run(train_lamb):
        assert got


def train_lamb():
    results = train_fleet(batches(), {"lamb": True, "localsgd": {"k_steps": 2}}, optimizer=adam)
    return all(v.isfinite().all() for v in results.values())


def overlapped(rounds, save_at=None, resume=False):
    model, optimizer = build({"localsgd": {"k_steps": 2, "overlap": True}}, optimizer=plain_sgd)
    data = share(batches(rounds), fleet.worker_index(), 2)
    for i, (x, y) in enumerate(data):
        zero_last(model, optimizer, x, y)
        if i == save_at:
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
            if resume:
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                model, optimizer = build({"localsgd": {"k_steps": 2, "overlap": True}}, optimizer=plain_sgd)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
    unfinished = weights(model)
    fleet.flush(optimizer=optimizer)
    return unfinished, weights(model)


def test_an_overlapped_average_is_applied_at_the_end_of_the_next_period(ranks):
    results = ranks.run(overlapped, 7)
    models = [net().double() for _ in range(2)]
    sent = None
    for step, (x, y) in enumerate(batches(7), start=1):
        for rank, model in enumerate(models):
            zero_last(model, plain_sgd(model), x.double().chunk(2)[rank], y.double().chunk(2)[rank])
        if step % 2 == 1:
            with torch.no_grad():
                now = [[p.clone() for p in m.parameters()] for m in models]
                if sent is not None:
                    for m, mine in zip(models, sent, strict=True):
                        for p, s, *all_ in zip(m.parameters(), mine, *sent, strict=True):
                            p.add_(torch.stack(all_).mean(0) - s, alpha=0.5)
                    now = [[p.clone() for p in m.parameters()] for m in models]
                sent = now
    for (got, final), model in zip(results, models, strict=True):
        assert_close(got, {k: v.float() for k, v in weights(model).items()})
        assert_equal(final, results[0][1])


@pytest.mark.parametrize("at", [2, 3])
def test_a_checkpoint_during_an_overlapped_average(ranks, at):
    """Saving changes nothing, and a resumed run equals the uninterrupted one, bit for bit."""
    plain, saved, resumed = ranks.run(overlapped, 7), ranks.run(overlapped, 7, at), ranks.run(overlapped, 7, at, True)
    for a, b, c in zip(plain, saved, resumed, strict=True):
        assert_equal(a[0], b[0])
        assert_equal(a[0], c[0])


def loaded_over(used):
    """Two rounds from a checkpoint that has no average under way, loaded by a run that has one, or by a new one."""
    model, optimizer = build({"localsgd": {"k_steps": 2}}, optimizer=plain_sgd)
    data = share(batches(8), fleet.worker_index(), 2)
    zero_last(model, optimizer, *data[0])
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    model, optimizer = build({"localsgd": {"k_steps": 2, "overlap": True}}, optimizer=plain_sgd)
    for x, y in data[1:4] if used else ():
        zero_last(model, optimizer, x, y)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for x, y in data[4:6]:
        zero_last(model, optimizer, x, y)
    return weights(model)


def test_loading_drops_the_average_under_way(ranks):
    for got, expected in zip(ranks.run(loaded_over, True), ranks.run(loaded_over, False), strict=True):
        assert_equal(got, expected)


def flushed():
    model, optimizer = build({"localsgd": {"k_steps": 4}})
    for x, y in share(batches(7), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
    before = weights(model)
    fleet.flush()
    return before, weights(model)


def test_flush_averages_at_the_end_of_training(ranks):
    results = ranks.run(flushed)
    expected = mean_of([before for before, _ in results])
    for _, after in results:
        assert_close(after, expected)


def test_one_worker_has_nothing_to_communicate():
    with pytest.raises(StrategyError, match=r"one worker, so there is nothing to communicate.*allow_single"):
        build({"localsgd": True})
    assert_equal(train_fleet(batches(), {"localsgd": {"allow_single": True, "k_steps": 3}}), train(batches()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlap": True, "average_momentum": True}, "overlap with average_momentum is not supported yet"),
        ({"overlap_share": 0.25}, "overlap_share has no effect without overlap"),
        ({"k_steps": 0}, "k_steps"),
        ({"outer_momentum": 1.0}, "outer_momentum"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(StrategyError, match=message):
        fleet.DistributedStrategy(localsgd=settings).plan()


def twice_loaded():
    """The round of the last average after each step, in two runs resumed from one checkpoint."""
    model, optimizer = build({"localsgd": {"k_steps": 3}})
    data = share(batches(8), fleet.worker_index(), 2)
    for x, y in data[:2]:
        zero_last(model, optimizer, x, y)
    saved = optimizer.state_dict()
    out = []
    for _ in range(2):
        optimizer.load_state_dict(saved)
        last = []
        for x, y in data[2:]:
            zero_last(model, optimizer, x, y)
            last += fleet._engine(model).state["LocalSGD"]["last"]
        out.append(last)
    return out


def test_a_loaded_checkpoint_is_not_changed(ranks):
    for first, second in ranks.run(twice_loaded):
        assert first == second == [1, 4, 4, 4, 7, 7]


def test_parameters_of_several_dtypes_need_few_buckets():
    from fleetx.comm.averaging import buckets

    mixed = [torch.zeros(3, dtype=d) for _ in range(10) for d in (torch.float32, torch.bfloat16)]
    assert [len(b) for b in buckets(mixed)] == [10, 10]


class Branches(nn.Module):
    """Each input takes one of two branches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(6, 3, dtype=torch.float64) for _ in range(2))

    def forward(self, x, branch):
        return self.branches[branch](x)


def decaying(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.3)


ROUTES = [(0, 1), (0, 0), (1, 0), (1, 1), (0, 1)]  # the branch of each rank in each step


def branched(declared):
    model, optimizer = build({"find_unused_parameters": True} | declared, make=Branches, optimizer=decaying)
    rank = fleet.worker_index()
    for (x, y), route in zip(share(batches(5), rank, 2), ROUTES, strict=True):
        (model(x.double(), route[rank]) - y.double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.flush()
    return weights(model)


def by_hand(k):
    """Both ranks in this process: each updates on its own in every k-th step, and the first update is averaged."""
    models = [Branches(), Branches()]
    optimizers = [decaying(m) for m in models]
    for number, ((x, y), route) in enumerate(zip(batches(5), ROUTES, strict=True), 1):
        steps = k if number <= 5 // k * k else 5 % k
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss = (model(x.double().chunk(2)[rank], route[rank]) - y.double().chunk(2)[rank]).square().mean()
            (loss / steps).backward()
            if number % k == 0 or number == 5:
                optimizer.step()
                optimizer.zero_grad()
        if number == k:
            mean = mean_of([weights(m) for m in models])
            for model in models:
                model.load_state_dict(mean)
    return mean_of([weights(m) for m in models])


@pytest.mark.parametrize("k", [1, 2])
def test_a_rank_that_did_not_use_a_parameter_does_not_decay_it(ranks, k):
    merge = {"gradient_merge": {"k_steps": k}} if k > 1 else {}
    found = ranks.run(branched, {"localsgd": {"k_steps": 100, "begin_step": 1}} | merge)
    expected = by_hand(k)
    for got in found:
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def left_out(declared, at, how):
    """Which updates this rank applied, the loss scale, and the weights, if rank 1 leaves out some batches."""
    model, optimizer = build(declared)
    applied = []
    for i, (x, y) in enumerate(share(batches(6), fleet.worker_index(), 2)):
        out = fleet.worker_index() == 1 and i in at
        if not out or how == "zeroed":
            mse_loss(model(x), y).backward()
        if out:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        applied.append(fleet.updated)
    fleet.flush()
    return applied, fleet._engine(model).state.get("AMP"), weights(model)


FP16 = {"amp": {"init_loss_scaling": 1024.0, "decr_every_n_nan_or_inf": 1}}


@pytest.mark.parametrize("others", [FP16, FP16 | {"clip": True}, FP16 | {"gradient_merge": {"k_steps": 1}}], ids=str)
def test_a_rank_may_leave_out_batches_under_a_loss_scale(ranks, others):
    first, second = ranks.run(left_out, {"localsgd": {"k_steps": 3}} | others, (0, 3, 4), "zeroed")
    assert first[0] == [True] * 6
    assert second[0] == [False, True, True, False, False, True]
    assert first[1] == second[1] == {"scale": 1024.0, "good": 6, "bad": 0}
    assert_equal(first[2], second[2])


def overflows_alone(how):
    """The loss scale and the weights after rank 1 alone has overflowed while rank 0 left out a batch, or trained."""
    model, optimizer = build({"localsgd": {"k_steps": 100}} | FP16)
    for i, (x, y) in enumerate(share(batches(4), fleet.worker_index(), 2)):
        if i != 2 or fleet.worker_index() == 1 or how == "trains":
            (mse_loss(model(x), y) * (float("inf") if i == 2 and fleet.worker_index() == 1 else 1.0)).backward()
        before = weights(model)
        optimizer.step()
        optimizer.zero_grad()
        if i == 2:
            assert not fleet.updated
            assert_equal(weights(model), before)
    fleet.flush()
    return fleet._engine(model).state["AMP"], weights(model)


@pytest.mark.parametrize("how", ["trains", "leaves out a batch"])
def test_an_overflow_of_one_rank_between_two_averages_shrinks_the_scale_of_all(ranks, how):
    (scaling, got), (other, same) = ranks.run(overflows_alone, how)
    assert scaling == other == {"scale": pytest.approx(819.2), "good": 1, "bad": 0}
    assert_equal(got, same)


@pytest.mark.parametrize("how", ["zeroed", "no backward"])
@pytest.mark.parametrize(
    "others",
    [
        {},
        FP16,
        {"find_unused_parameters": True},
        {"localsgd": {"k_steps": 3, "outer_lr": 0.7, "outer_momentum": 0.5}},
        {"localsgd": {"k_steps": 3, "overlap": True}},
        {"fp16_allreduce": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:find_unused")
def test_a_rank_may_leave_out_its_first_batch(ranks, others, how):
    first, second = ranks.run(left_out, {"localsgd": {"k_steps": 3}} | others, (0, 4), how)
    assert first[0] == [True] * 6
    assert second[0] == [False, True, True, True, False, True]
    assert_equal(first[2], second[2])
    assert all(value.abs().max() < 2 for value in first[2].values())


def test_an_island_may_leave_out_its_first_batch(four):
    found = four.run(island_left_out)
    assert [applied for applied, _ in found] == [[True] * 3] * 2 + [[False, True, True]] * 2
    for _, got in found[1:]:
        assert_equal(got, found[0][1])


def island_left_out():
    model, optimizer = build({"localsgd": {"k_steps": 3, "group_size": 2}})
    applied = []
    for i, (x, y) in enumerate(share(batches(3), fleet.worker_index(), 4)):
        if i or fleet.worker_index() < 2:
            zero_last(model, optimizer, x, y)
        else:
            optimizer.step()
        applied.append(fleet.updated)
    fleet.flush()
    return applied, weights(model)


def one_after_another():
    """Models come and go, two of them at a time, as in a GAN or a search."""
    fleet.init()
    strategy = fleet.DistributedStrategy(localsgd={"k_steps": 1})
    kept = deque(maxlen=2)
    for _ in range(5):
        model = net()
        kept.append(fleet.distribute(model, plain_sgd(model), strategy))
        for each, optimizer in kept:
            for x, y in share(batches(3), fleet.worker_index(), 2):
                zero_last(each, optimizer, x, y)
    return [weights(model) for model, _ in kept]


def test_models_come_and_go(ranks):
    for first, second in zip(*ranks.run(one_after_another), strict=True):
        assert_equal(first, second)


def frozen_beside_a_left_out_batch():
    """Both ranks freeze a layer in the same step, in which one of them has no batch."""
    model, optimizer = build({"localsgd": {"k_steps": 2}}, optimizer=plain_sgd)
    for i, (x, y) in enumerate(share(batches(6), fleet.worker_index(), 2)):
        if i == 3:
            model[0].requires_grad_(False)
        if (i, fleet.worker_index()) == (3, 1):
            optimizer.step()
            optimizer.zero_grad()
        else:
            zero_last(model, optimizer, x, y)
    fleet.flush()
    return weights(model)


def test_a_rank_may_leave_out_the_batch_in_which_a_layer_is_frozen(ranks):
    first, second = ranks.run(frozen_beside_a_left_out_batch)
    assert_equal(first, second)
