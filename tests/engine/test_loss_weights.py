"""`fleet.weight`: unequal shares of a batch, weighted by their items, are the batch."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile

from fleetx import UsageError, fleet
from training import LOOPS, adam, adamw, assert_close, assert_equal, net, sgd, weights, zero_last

MERGE = {"gradient_merge": {"k_steps": 3}}
FP16 = {"amp": {"init_loss_scaling": 4096.0}}
ITEMS = [3, 1, 5, 2, 7, 4, 1, 6, 2, 8, 1, 3]  # of one step on one rank


def rounds(k, size, n=5, width=6):
    """For each round, for each rank, k batches; no two neighbours are equally large."""
    g = torch.Generator().manual_seed(1)
    counts = iter(ITEMS * n)

    def batch():
        items = next(counts)
        return torch.randn(items, width, generator=g), torch.randn(items, 3, generator=g)

    return [[[batch() for _ in range(k)] for _ in range(size)] for _ in range(n)]


def reference(data, *, make=net, optimizer=sgd, step=zero_last):
    """Plain PyTorch in float64, each round one batch."""
    model = make().double()
    o = optimizer(model)
    for shares in data:
        x, y = (torch.cat([batch[i] for share in shares for batch in share]).double() for i in (0, 1))
        step(model, o, x, y)
    return weights(model.float())


def armed(declared=None, *, make=net, optimizer=sgd):
    fleet.init()
    model = make()
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**(declared or {})))


def weighted(data, declared, *, make=net, optimizer=sgd, loop=zero_last, times=1):
    model, o = armed(declared, make=make, optimizer=optimizer)
    for shares in data:
        for x, y in shares[fleet.worker_index()]:
            fleet.weight(len(x) * times)
            loop(model, o, x, y)
        assert fleet.updated
    return weights(model)


# --- the big batch --------------------------------------------------------------------------------
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_unequal_steps_that_are_merged_equal_the_big_batch(loop, optimizer):
    data = rounds(3, 1)
    assert_close(weighted(data, MERGE, optimizer=optimizer, loop=loop), reference(data, optimizer=optimizer))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_unequal_steps_on_unequal_ranks_equal_the_big_batch(ranks, k, optimizer):
    data = rounds(k, 2)
    found = ranks.run(_weighted, data, {"gradient_merge": {"k_steps": k}, "fuse_grad_size_in_MB": 0.0005}, optimizer)
    assert_equal(found[0], found[1])
    assert_close(found[0], reference(data, optimizer=optimizer))


def _weighted(data, declared, optimizer=sgd, make=net, times=1):
    return weighted(data, declared, make=make, optimizer=optimizer, times=times)


def test_without_weights_unequal_ranks_do_not():
    """What the weights are for."""
    data = rounds(3, 1)
    model, optimizer = armed(MERGE)
    for shares in data:
        for x, y in shares[0]:
            zero_last(model, optimizer, x, y)
    with pytest.raises(AssertionError):
        assert_close(weights(model), reference(data))


@settings(max_examples=25)
@given(n=st.lists(st.tuples(st.integers(0, 10**9), st.integers(-8, 8)), min_size=1, max_size=9), k=st.integers(1, 4))
def test_every_window_and_its_tail_have_their_weighted_mean(n, k):
    model, optimizer = armed({"gradient_merge": {"k_steps": k}}, make=_one_weight, optimizer=_rate_of_one)
    windows = [n[i : i + k] for i in range(0, len(n), k)]
    if not all(sum(items for items, _ in window) for window in windows):
        return
    for items, slope in n:
        fleet.weight(items, optimizer)
        (model(torch.ones(1, 1)) * slope).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.flush(optimizer=optimizer)
    want = -sum(sum(items * slope for items, slope in w) / sum(items for items, _ in w) for w in windows)
    assert model.weight.item() == pytest.approx(want, rel=1e-5, abs=1e-5)


def _one_weight():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def _rate_of_one(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def test_a_window_that_is_flushed_is_divided_by_its_own_items(ranks):
    data = rounds(3, 2)
    tail = [share[:2] for share in rounds(3, 2, n=6)[-1]]
    found = ranks.run(_flushed, data, tail)
    assert_equal(found[0], found[1])
    assert_close(found[0], reference([*data, tail]))


def _flushed(data, tail, declared=MERGE, make=net):
    model, optimizer = armed(declared, make=make)
    for shares in [*data, tail]:
        for x, y in shares[fleet.worker_index()]:
            fleet.weight(len(x))
            zero_last(model, optimizer, x, y)
    assert fleet.flush()
    return weights(model)


@pytest.mark.parametrize("out", [0, 2])
def test_a_batch_that_is_left_out_counts_for_nothing(out):
    """Also the last of its window: what was withheld is then applied without a backward."""
    data = rounds(3, 1)
    model, optimizer = armed(MERGE)
    for shares in data:
        for i, (x, y) in enumerate(shares[0]):
            fleet.weight(len(x))
            if i != out:
                mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(weights(model), reference([[[b for i, b in enumerate(s[0]) if i != out]] for s in data]))


# --- with other parts -----------------------------------------------------------------------------
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    "declared",
    [{"recompute": {"checkpoints": ["0", "2"]}}, {"fp16_allreduce": {"dtype": "float16"}}, {"nccl_comm_num": 2}],
    ids=lambda d: next(iter(d)),
)
def test_with_parts_that_change_no_number(ranks, declared, k):
    data = rounds(k, 2)
    rough = "fp16_allreduce" in declared
    found = ranks.run(_weighted, data, {"gradient_merge": {"k_steps": k}, **declared})
    assert_equal(found[0], found[1])
    torch.testing.assert_close(found[0], reference(data), rtol=1e-2 if rough else 1e-5, atol=1e-3 if rough else 1e-6)


@pytest.mark.parametrize("k", [1, 3])
def test_clip_acts_on_the_weighted_mean(ranks, k):
    def clipped(model, optimizer, x, y):
        mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()

    data = rounds(k, 2)
    found = ranks.run(_weighted, data, {"gradient_merge": {"k_steps": k}, "clip": {"clip_norm": 0.2}})
    assert_close(found[0], reference(data, step=clipped))


@pytest.mark.parametrize(("rule", "optimizer"), [("lars", sgd), ("lamb", adam)])
def test_the_layerwise_rules_take_the_weighted_mean(ranks, rule, optimizer):
    """Against the same rule on the big batch, in one process."""
    data = rounds(3, 2)
    found = ranks.run(_weighted, data, {rule: True, **MERGE}, optimizer)
    assert_equal(found[0], found[1])
    model, o = armed({rule: True}, optimizer=optimizer)
    for shares in data:
        zero_last(model, o, *(torch.cat([batch[i] for share in shares for batch in share]) for i in (0, 1)))
    assert_close(found[0], weights(model))


class Normed(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def test_with_sync_batch_norm_unequal_ranks_are_one_batch(ranks):
    """The gradients of the ranks are mixed on the way, so that their weights must have the same unit by then."""
    data = rounds(1, 2)
    for found in ranks.run(_weighted, data, {"sync_batch_norm": True}, sgd, Normed):
        assert_close(found, reference(data, make=Normed))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("k", [1, 3])
def test_half_precision_is_as_near_as_it_is_without_weights(ranks, dtype, k):
    data = rounds(k, 2)
    found = ranks.run(_weighted, data, {"gradient_merge": {"k_steps": k}, "amp": {"dtype": dtype}})
    assert_equal(found[0], found[1])
    torch.testing.assert_close(found[0], reference(data), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("k", [1, 3])
def test_many_items_do_not_overflow_float16(ranks, k):
    """Every update is applied (`weighted` asserts so), and bit for bit as with few."""
    data = rounds(k, 2)
    declared = {"gradient_merge": {"k_steps": k}, **FP16}
    few, many = (ranks.run(_weighted, data, declared, sgd, net, times)[0] for times in (1, 2**30))
    assert_equal(few, many)


def wide():
    """One tensor that dgc compresses, and small ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(160, 128), nn.Tanh(), nn.Linear(128, 3))


@pytest.mark.parametrize("extra", [{}, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("k", [1, 3])
def test_dgc_gathers_the_weighted_mean(ranks, k, extra):
    """Sent whole (sparsity 0) it is SGD with momentum on the big batch."""
    data = rounds(k, 2, width=160)
    declared = {"gradient_merge": {"k_steps": k}, "dgc": {"sparsity": [0.0]}, **extra}
    found = ranks.run(_weighted, data, declared, sgd, wide)
    assert_equal(found[0], found[1])
    near = {"rtol": 0.02, "atol": 0.02} if extra else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found[0], reference(data, make=wide), **near)


def test_dgc_knows_the_divisor_of_a_window_that_is_flushed(ranks):
    data = rounds(3, 2, width=160)
    tail = [share[:1] for share in rounds(3, 2, n=6, width=160)[-1]]
    found = ranks.run(_flushed, data, tail, MERGE | {"dgc": {"sparsity": [0.0]}}, wide)
    assert_close(found[0], reference([*data, tail], make=wide))


@pytest.mark.parametrize("k", [1, 3])
def test_under_localsgd_each_rank_weighs_its_own_steps_and_tells_nobody(ranks, k):
    data = rounds(k, 2)
    found = ranks.run(_local, data, {"gradient_merge": {"k_steps": k}, "localsgd": {"k_steps": 1}})
    assert_equal(found[0][0], found[1][0])
    assert found[0][1] == (0, 0)  # besides the average of each round
    alone = nn.ModuleList([net(), net()]).double()
    for shares in data:
        for model, share in zip(alone, shares, strict=True):
            x, y = (torch.cat([batch[i] for batch in share]).double() for i in (0, 1))
            zero_last(model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
        mean = {n: (p + q) / 2 for (n, p), q in zip(weights(alone[0]).items(), weights(alone[1]).values(), strict=True)}
        for model in alone:
            model.load_state_dict(mean)
    assert_close(found[0][0], {n: p.float() for n, p in mean.items()})


def _local(data, declared):
    model, optimizer = armed(declared, optimizer=_plain_sgd)
    reductions, gathers = _collectives(data, model, optimizer, use=True)
    return weights(model), (reductions - len(data), gathers)


def _plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# --- shares without items -------------------------------------------------------------------------
@pytest.mark.parametrize("backward", ["loss", "fleet"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_share_without_items_does_not_count_though_its_mean_is_nan(ranks, k, backward):
    data = rounds(k, 2)
    found = ranks.run(_empty_shares, data, k, backward)
    assert_equal(found[0], found[1])
    assert_close(
        found[0], reference([[share for rank, share in enumerate(s) if rank != i % 2] for i, s in enumerate(data)])
    )


def _empty_shares(data, k, backward):
    """Each rank in turn has nothing but padding."""
    model, optimizer = armed({"gradient_merge": {"k_steps": k}})
    for i, shares in enumerate(data):
        for x, y in shares[fleet.worker_index()]:
            mask = torch.full((len(x), 1), float(fleet.worker_index() != i % 2))
            fleet.weight(mask.sum())
            loss = ((model(x) - y).square() * mask).sum() / (mask.sum() * 3)
            loss.backward() if backward == "loss" else fleet.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def test_a_round_without_any_items_is_refused_on_every_rank(ranks):
    for message in ranks.run(_nothing_at_all):
        assert message == (
            "the weights of this round add up to 0, so there is no mean: skip such batches before their backward()"
        )


def _nothing_at_all():
    model, optimizer = armed()
    try:
        _step(model, optimizer, 0)
    except UsageError as error:
        return str(error)


def _step(model, optimizer, n=None):
    if n is not None:
        fleet.weight(n, optimizer)
    zero_last(model, optimizer, torch.ones(2, 6), torch.ones(2, 3))


# --- loops ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("when", ["before the forward", "after it"])
def test_a_model_in_front_of_a_weighted_one_gets_its_true_gradient(when):
    data = rounds(3, 1, n=2)
    front = nn.Linear(6, 6)
    model, optimizer = armed(MERGE)
    plain, twin = net(), copy.deepcopy(front)
    for x, y in (batch for shares in data for batch in shares[0]):
        if when == "before the forward":
            fleet.weight(len(x))
        loss = mse_loss(model(front(x)), y)
        if when == "after it":
            fleet.weight(len(x))
        plain.load_state_dict(model.state_dict())
        loss.backward()
        mse_loss(plain(twin(x)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(front.weight.grad, twin.weight.grad)


@pytest.mark.parametrize("k", [1, 3])
def test_a_penalty_on_weights_counts_once_through_fleet_backward(ranks, k):
    data = rounds(k, 2)

    def plain(model, optimizer, x, y):
        _penalised(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = ranks.run(_train_penalised, data, k)
    assert_close(found[0], reference(data, step=plain))


def _penalised(model, x, y):
    return mse_loss(model(x), y) + 0.01 * sum(p.square().sum() for p in model.parameters())


def _train_penalised(data, k):
    def loop(model, optimizer, x, y):
        fleet.backward(_penalised(model, x, y))
        optimizer.step()
        optimizer.zero_grad()

    return weighted(data, {"gradient_merge": {"k_steps": k}}, loop=loop)


def test_several_backwards_of_a_step_share_its_weight(ranks):
    data = rounds(3, 2)
    found = ranks.run(_two_backwards, data)
    assert_equal(found[0], found[1])
    assert_close(found[0], reference(data))


def _two_backwards(data):
    def loop(model, optimizer, x, y):
        (mse_loss(model(x), y) * 0.25).backward()
        (mse_loss(model(x), y) * 0.75).backward()
        optimizer.step()
        optimizer.zero_grad()

    return weighted(data, MERGE, loop=loop)


def test_a_loss_on_gradients_is_refused_outside_of_fleet_backward():
    model, _ = armed(MERGE)
    x = torch.randn(4, 6, requires_grad=True)
    fleet.weight(4)
    out = model(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(UsageError, match=r"call fleet.backward\(loss\) instead of loss.backward\(\)"):
        (out + slope.square().sum()).backward()


@pytest.mark.parametrize("n", [3, 3.0, torch.tensor(3), torch.tensor([3.0])], ids=repr)
def test_numbers_of_any_kind_are_taken(n):
    model, optimizer = armed(MERGE)
    for _ in range(3):
        _step(model, optimizer, n)
    assert fleet.updated


# --- checkpoints ----------------------------------------------------------------------------------
RESUMED = [{}, FP16, {"amp": {"dtype": "bfloat16"}, "clip": True}]


@pytest.mark.parametrize("declared", RESUMED, ids=["fp32", "fp16", "bf16 and clip"])
@pytest.mark.parametrize("stop", [0, 4, 5])
def test_a_run_resumed_anywhere_is_the_unbroken_run_bit_for_bit(ranks, declared, stop):
    assert _resumes(rounds(3, 1), declared | MERGE, stop)
    assert ranks.run(_resumes, rounds(3, 2), declared | MERGE, stop) == [True, True]


def _resumes(data, declared, stop):
    model, optimizer = armed(declared)
    steps = [batch for shares in data for batch in shares[fleet.worker_index()]]
    for i, (x, y) in enumerate(steps):
        fleet.weight(len(x), optimizer)
        zero_last(model, optimizer, x, y)
        if i == stop:
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, optimizer2 = armed(declared)
    again.load_state_dict(saved[0])
    optimizer2.load_state_dict(saved[1])
    for x, y in steps[stop + 1 :]:
        fleet.weight(len(x), optimizer2)
        zero_last(again, optimizer2, x, y)
    return all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))


def test_a_checkpoint_binds_inside_of_a_window_and_nowhere_else():
    model, optimizer = armed(MERGE)
    _step(model, optimizer, 2)
    inside = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        _step(model, optimizer, 2)
    between = copy.deepcopy(optimizer.state_dict())
    again, optimizer2 = armed(MERGE)
    optimizer2.load_state_dict(between)
    _step(again, optimizer2)
    optimizer2.load_state_dict(inside)
    with pytest.raises(UsageError, match="was called in earlier steps but not in this one"):
        _step(again, optimizer2)


def test_what_is_not_used_is_not_saved():
    model, optimizer = armed(MERGE)
    _step(model, optimizer)
    assert "weights" not in optimizer.state_dict()["fleetx"]


# --- what it costs --------------------------------------------------------------------------------
def test_the_ranks_talk_once_at_the_beginning_and_once_a_round_where_weights_are_used(ranks):
    data = rounds(3, 2, n=4)
    assert ranks.run(_count, data, True) == [(8, 2)] * 2  # a gather is that of the hashes after the first update
    assert ranks.run(_count, data, False) == [(4, 2)] * 2


def _count(data, use):
    return _collectives(data, *armed(MERGE), use=use)


def _collectives(data, model, optimizer, *, use):
    """How many all-reduces and gathers."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for x, y in (batch for shares in data for batch in shares[fleet.worker_index()]):
            if use:
                fleet.weight(len(x))
            zero_last(model, optimizer, x, y)
    return tuple(sum(e.name == f"gloo:{kind}" for e in seen.events()) for kind in ("all_reduce", "all_gather"))


# --- what is refused ------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [-1, float("nan"), float("inf"), "3", None, torch.ones(2)], ids=repr)
def test_what_is_no_number_of_items_is_refused(n):
    armed(MERGE)
    with pytest.raises(
        UsageError, match="pass the number of items that the loss is averaged over, finite and at least 0"
    ):
        fleet.weight(n)


def test_a_sum_has_no_weights():
    armed({"gradient_merge": {"k_steps": 2, "avg": False}})
    with pytest.raises(UsageError, match=r"avg'\] = False asks for the sum: set avg=True"):
        fleet.weight(1)


def test_a_second_weight_and_a_late_one_are_refused():
    model, optimizer = armed(MERGE)
    fleet.weight(1)
    with pytest.raises(UsageError, match="called twice before one backward: call it once per step"):
        fleet.weight(1)
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(UsageError, match=r"called after backward\(\): call it before"):
        fleet.weight(1)
    optimizer.step()
    fleet.weight(1)


def test_every_step_has_a_weight_or_none_has():
    model, optimizer = armed(MERGE)
    _step(model, optimizer, 2)
    with pytest.raises(
        UsageError, match="called in earlier steps but not in this one: call it in every step or in none"
    ):
        _step(model, optimizer)
    model, optimizer = armed(MERGE)
    _step(model, optimizer)
    with pytest.raises(UsageError, match="not called in earlier steps: call it in every step or in none"):
        _step(model, optimizer, 2)


@pytest.mark.parametrize("declared", [{}, MERGE, {"dgc": True}], ids=["plain", "merge", "dgc"])
def test_every_rank_has_weights_or_none_has(ranks, declared):
    """Found on all of them, before one waits for the other."""
    for message in ranks.run(_on_one_rank_only, declared, False):
        assert message == "fleet.weight was called on rank 1 but not on rank 0: call it on every rank or on none"


def test_also_where_the_window_is_flushed(ranks):
    first, second = ranks.run(_on_one_rank_only, MERGE, True)
    rule = "every rank must make the same calls in order"
    assert first == f"rank 0 is in fleet.flush, but rank 1 is in fleet.weight: {rule}"
    assert second == "fleet.weight was called on rank 1 but not on rank 0: call it on every rank or on none"


def _on_one_rank_only(declared, flush):
    model, optimizer = armed(declared)
    try:
        for _ in range(2 if flush else 3):
            _step(model, optimizer, 2 if fleet.worker_index() == 1 else None)
        fleet.flush()
    except UsageError as error:
        said = str(error)
        if "fleet.flush" in said:  # rank 1 still waits
            with pytest.raises(UsageError, match="called on rank 1 but not on rank 0"):
                _step(model, optimizer)
        return said
