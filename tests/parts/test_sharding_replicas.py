"""Strategies that act between the replicas of shards: two groups of two ranks, against one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

import wires
from covering import covering
from fleetx import StrategyError, UsageError, fleet
from training import batches, net, share

SHARDED = {"sharding": {"sharding_degree": 2, "hybrid_dp": True}}
BY_NAME = {"sharding_segment_strategy": "segment_anchors", "segment_anchors": ["0", "2"]}
SEGMENTS = {"sharding": {"sharding_degree": 2, "hybrid_dp": True, "stage": 3, **BY_NAME}}
HALF = {"fp16_allreduce": True}
LOCAL = {"localsgd": {"k_steps": 4}}
QUANTIZED = {"quantized_allreduce": {"bits": 8, "block": 8}}
SPARSE = {"dgc": {"sparsity": [0.9]}}
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.5}


def near(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def whole(model):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in model.state_dict().items()}


def build(declared, make=wires.double_net, optimizer=wires.plain_sgd):
    fleet.init()
    model = make()
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))


def trained(data, declared, make=wires.double_net, optimizer=wires.plain_sgd):
    model, o = build(declared, make, optimizer)
    dtype = next(model.parameters()).dtype
    for x, y in share(data, fleet.worker_index(), fleet.worker_num()):
        fleet.backward(mse_loss(model(x.to(dtype)), y.to(dtype)), optimizer=o)
        o.step()
        o.zero_grad()
    return whole(model)


TENSORS = [name for name, _ in net().named_parameters()]


def code_of(wire):
    """The simulated exchange of two replicas of two shards."""
    if wire is HALF:
        return wires.Half()
    bits = wire["quantized_allreduce"]["bits"]
    return wires.Sharded(lambda: wires.Quantized(bits, 8, 2), TENSORS)


# --- nothing is coded -----------------------------------------------------------------------------
@pytest.mark.parametrize("sharded", [SHARDED, SEGMENTS], ids=["one segment", "three segments"])
@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"nccl_comm_num": 2},
        {"use_hierarchical_allreduce": True},
        {"clip": {"clip_norm": 1e9}},
        {"dgc": {"sparsity": [0.0]}},
        {"quantized_allreduce": {"bits": 32}},
    ],
    ids=str,
)
def test_at_neutral_settings_it_is_data_parallelism(four, declared, sharded):
    for got in four.run(trained, batches(), sharded | declared):
        near(got, wires.data_parallel(batches(), 1))


def merged(steps):
    """Rounds of three steps, and the last of the rest."""
    model, o = build(SHARDED | {"gradient_merge": {"k_steps": 3}})
    sent = []
    for x, y in share(batches(steps), fleet.worker_index(), 4):
        mse_loss(model(x.double()), y.double()).backward()
        o.step()
        o.zero_grad()
        sent.append(fleet._engine(model).network.traffic.sent)
    fleet.flush()
    return whole(model), sent


def test_replicas_reduce_once_per_round_also_one_that_a_flush_ends(four):
    model = wires.double_net()
    o = wires.plain_sgd(model)
    data = batches(8)
    for window in (data[:3], data[3:6], data[6:]):
        for x, y in window:
            (mse_loss(model(x.double()), y.double()) / len(window)).backward()
        o.step()
        o.zero_grad()
    for got, sent in four.run(merged, 8):
        near(got, model.state_dict())
        assert sent[:2] == [0, 0]
        assert sent[2:8] == [sent[2]] * 3 + [2 * sent[2]] * 3


def twice(data):
    """Two backwards before each step, and a loss that reads a weight itself."""
    model, o = build(SEGMENTS)
    for x, y in share(data, fleet.worker_index(), 4):
        for half in (0, 1):
            loss = mse_loss(model(x[half : half + 1].double()), y[half : half + 1].double())
            penalty = model[2].weight.full_tensor().square().sum()
            fleet.backward((loss + 0.1 * penalty * (1 + fleet.worker_index())) / 2, optimizer=o)
        o.step()
        o.zero_grad()
    return whole(model)


def test_several_backwards_and_a_loss_that_reads_a_weight(four):
    """The ranks weigh the penalty 1 to 4 times."""
    data = batches(4, 8)
    model = wires.double_net()
    o = wires.plain_sgd(model)
    for x, y in data:
        (mse_loss(model(x.double()), y.double()) + 0.25 * model[2].weight.square().sum()).backward()
        o.step()
        o.zero_grad()
    for got in four.run(twice, data):
        near(got, model.state_dict())


# --- codes ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("sharded", [SHARDED, SEGMENTS], ids=["one segment", "three segments"])
def test_half_precision_between_replicas_equals_a_simulation(four, sharded):
    simulated = wires.data_parallel(batches(), 2, wires.Half())
    for got in four.run(trained, batches(), sharded | HALF):
        near(got, simulated)


@pytest.mark.parametrize("wire", [QUANTIZED, {"quantized_allreduce": {"bits": 4, "block": 8}}], ids=str)
def test_blocks_between_replicas_equal_a_simulation(four, wire):
    """Every shard begins with a block of its own."""
    simulated = wires.data_parallel(batches(), 2, code_of(wire))
    for got in four.run(trained, batches(), SHARDED | wire):
        near(got, simulated)


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 3))


def wide_double():
    return wide().double()


WIDE = [name for name, _ in wide().named_parameters()]


def sparse():
    """The shards of the one tensor of 16384 elements have half as many."""
    return wires.Sharded(lambda: wires.Sparse(0.1, 8192, 2), WIDE)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("sharded", [SHARDED, SEGMENTS], ids=["one segment", "three segments"])
def test_the_largest_values_between_replicas_equal_a_simulation(four, sharded):
    simulated = wires.data_parallel(batches(7), 2, sparse(), make=wide_double)
    for got in four.run(trained, batches(7), sharded | SPARSE, wide):
        expected = {k: v.float() for k, v in simulated.items()}
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-6)


def test_dgc_sends_everything_with_momentum(four):
    """With nothing left out, the momentum that it keeps on each rank is that of SGD."""
    model = wide_double()
    o = momentum(model)
    for x, y in batches(7):
        mse_loss(model(x.double()), y.double()).backward()
        o.step()
        o.zero_grad()
    for got in four.run(trained, batches(7), SEGMENTS | {"dgc": {"sparsity": [0.0]}}, wide, momentum):
        expected = {k: v.float() for k, v in model.state_dict().items()}
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-6)


def large():
    torch.manual_seed(0)
    return nn.Linear(600, 400)


def sent(declared):
    model, o = build(declared, large)
    for _ in range(5):
        (model(torch.randn(64, 600)) * torch.randn(64, 400)).sum().backward()
        o.step()
        o.zero_grad()
    return fleet._engine(model).network.traffic.sent


@pytest.mark.parametrize(("declared", "rounds", "bytes_per_value"), [({}, 5, 4), (HALF, 5, 2)])
def test_the_bytes_between_replicas_are_those_of_a_shard(four, declared, rounds, bytes_per_value):
    """A ring of two ranks sends a buffer once."""
    for got in four.run(sent, SHARDED | declared):
        assert got == pytest.approx(rounds * (600 * 400 + 400) / 2 * bytes_per_value, rel=0.02)


def test_the_bytes_of_the_largest_values_follow_the_code(four):
    """A tenth of the values in 4 bytes; gaps of 9 on average in 3 bits, one for each 8, and one."""
    indices = (3 + 1 + 0.9**8 / (1 - 0.9**8)) / 8
    for got in four.run(sent, SHARDED | SPARSE):
        assert got == pytest.approx(5 * (600 * 400 / 2 / 10 * (4 + indices) + 400 / 2 * 4), rel=0.02)


# --- local updates: an island is a group that shares one copy -------------------------------------
@pytest.mark.parametrize(
    ("wire", "local", "sharded"),
    covering(
        [{}, {"dgc": {"sparsity": [0.0]}}, {"quantized_allreduce": {"bits": 32}}],
        [{"localsgd": {"k_steps": 1}}, {"adaptive_localsgd": {"max_k_steps": 1}}],
        [SHARDED, SEGMENTS],
    ),
)
def test_at_neutral_settings_local_updates_are_data_parallelism(four, wire, local, sharded):
    for got in four.run(trained, batches(), sharded | local | wire):
        near(got, wires.data_parallel(batches(), 1))


@pytest.mark.parametrize("wire", [{}, HALF, QUANTIZED], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, OUTER, {"overlap": True}, {"overlap": True} | OUTER, {"fragments": 2} | OUTER], ids=str
)
def test_local_updates_between_groups_equal_a_simulation(four, settings, wire):
    """The first two tensors have not quite half of all numbers."""
    simulated = wires.local_updates(
        batches(9), 4, 2, code_of(wire) if wire else None, island=2,
        fragments=[TENSORS[:2], TENSORS[2:]] if "fragments" in settings else 1,
        lr=settings.get("outer_lr", 1.0), momentum=settings.get("outer_momentum", 0.0),
        share=0.5 if "overlap" in settings else None,
    )  # fmt: skip
    for rank, got in enumerate(four.run(trained, batches(9), SHARDED | wire | {"localsgd": {"k_steps": 2} | settings})):
        near(got, simulated[rank // 2])


def test_a_sparse_outer_gradient_between_groups_equals_a_simulation(four):
    simulated = wires.local_updates(batches(7), 4, 2, sparse(), island=2, make=wide_double)
    for rank, got in enumerate(four.run(trained, batches(7), SHARDED | SPARSE | {"localsgd": {"k_steps": 2}}, wide)):
        expected = {k: v.float() for k, v in simulated[rank // 2].items()}
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-6)


def adapted(data):
    model, o = build(SHARDED | {"adaptive_localsgd": {"init_k_steps": 4}})
    periods = []
    for x, y in share(data, fleet.worker_index(), 4):
        fleet.backward(mse_loss(model(x.double()), y.double()), optimizer=o)
        o.step()
        o.zero_grad()
        periods.append(fleet._engine(model).state["AdaptiveLocalSGD"]["k"])
    return periods


def test_the_adaptive_period_follows_the_loss_of_all_ranks(four):
    data = batches(9)
    losses = []
    models = [wires.double_net() for _ in range(2)]
    for x, y in data:
        halves = [mse_loss(m(a.double()), b.double()) for m, a, b in zip(models, x.chunk(2), y.chunk(2), strict=True)]
        losses.append(sum(loss.item() for loss in halves) / 2)
        for m, loss in zip(models, halves, strict=True):
            loss.backward()
            with torch.no_grad():
                for p in m.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
        if len(losses) in (1, 5):
            with torch.no_grad():
                for same in zip(*(m.parameters() for m in models), strict=True):
                    mean = sum(same) / 2
                    for p in same:
                        p.copy_(mean)
    expected = [4] * 4 + [math.ceil(math.sqrt(losses[4] / losses[0]) * 4)]
    for got in four.run(adapted, data):
        assert got[:5] == expected


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x):
        return self.body(x)


def drift(declared):
    """The weights and buffers after each round."""
    model, o = build(declared, Normed)
    out = []
    for x, y in share(batches(4, 8), fleet.worker_index(), 4):
        mse_loss(model(x), y).backward()
        o.step()
        o.zero_grad()
        out.append(whole(model))
    return out


def test_a_group_is_equal_after_every_round_and_all_are_after_an_average(four):
    results = four.run(drift, SHARDED | {"localsgd": {"k_steps": 3}})
    for number, (a, b, c, d) in enumerate(zip(*results, strict=True), start=1):
        for name in a:
            assert torch.equal(a[name], b[name])
            assert torch.equal(c[name], d[name])
        everywhere = all(torch.equal(a[name], c[name]) for name in a)
        assert everywhere == (number in (1, 4))


def weighted(data):
    """Rank 0 of each group has three times as many items as rank 1."""
    model, o = build(SHARDED | {"localsgd": {"k_steps": 100}})
    for x, y in data:
        group, rank = divmod(fleet.worker_index(), 2)
        mine = slice(4 * group + 3 * rank, 4 * group + 3 + rank)
        fleet.weight(3 - 2 * rank)
        mse_loss(model(x[mine].double()), y[mine].double()).backward()
        o.step()
        o.zero_grad()
    return whole(model)


def test_weights_count_within_a_group(four):
    data = batches(3, 8)
    simulated = wires.local_updates(data, 2, 100)
    for rank, got in enumerate(four.run(weighted, data)):
        near(got, simulated[rank // 2])


class Branches(nn.Module):
    """Each rank takes one of three branches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x, branch):
        return self.branches[branch](x)


def branching(declared):
    """Groups (0, 1) and (2, 3) use branches 0 and 1, and 2. After round 1 they train on their own."""
    model, o = build(
        declared | {"find_unused_parameters": True}, Branches,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.5),
    )  # fmt: skip
    out = []
    for x, y in batches(3):
        mse_loss(model(x, min(fleet.worker_index(), 2)), y).backward()
        o.step()
        o.zero_grad()
        out.append(whole(model))
    return out


def test_what_nobody_in_a_group_uses_does_not_decay_there(four):
    results = four.run(branching, SHARDED | {"localsgd": {"k_steps": 100}})
    for name in results[0][0]:
        idle = [0, 1] if name.startswith("branches.2") else [2, 3]
        for rank, rounds in enumerate(results):
            assert torch.equal(rounds[0][name], rounds[2][name]) == (rank in idle)


# --- checkpoints ----------------------------------------------------------------------------------
def on(model, o, data, start=0):
    for x, y in share(data, fleet.worker_index(), fleet.worker_num())[start:]:
        fleet.backward(mse_loss(model(x), y), optimizer=o)
        o.step()
        o.zero_grad()


def saves(declared, folder, at):
    model, o = build(declared, wide, momentum)
    on(model, o, batches(10)[:at])
    fleet.save(folder)
    on(model, o, batches(10), at)
    return whole(model)


MERGED = {"gradient_merge": {"k_steps": 2}}
KEPT = [
    HALF | MERGED, LOCAL, {"localsgd": {"k_steps": 3, "overlap": True, "fragments": 2} | OUTER} | HALF,
    {"adaptive_localsgd": {"init_k_steps": 3}}, SPARSE, SPARSE | MERGED, QUANTIZED, QUANTIZED | MERGED,
    {"localsgd": {"k_steps": 3, "overlap": True} | OUTER} | QUANTIZED, LOCAL | SPARSE,
]  # fmt: skip


@pytest.mark.parametrize("declared", KEPT, ids=str)
def test_a_run_resumed_in_the_middle_is_bit_identical(four, tmp_path, declared):
    folder = str(tmp_path / "checkpoint")
    wanted = four.run(saves, SEGMENTS | declared, folder, 5)
    for got, want in zip(four.run(goes_on, SEGMENTS | declared, folder, 5), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def goes_on(declared, folder, at):
    model, o = build(declared, wide, momentum)
    fleet.load(folder)
    on(model, o, batches(10), at)
    return whole(model)


OTHERS = {"two ranks": {}, "two shards of one": {"sharding": {"sharding_degree": 1, "hybrid_dp": True}}}


def state_of(model, key):
    return {k: dict(v) for k, v in fleet._engine(model).state[key].items() if isinstance(v, dict)}


def kept(declared, key, folder):
    model, o = build(declared, wide, momentum)
    on(model, o, batches(6))
    fleet.save(folder)
    return whole(model), state_of(model, key)


def taken_over(declared, key, folder):
    model, _ = build(declared, wide, momentum)
    fleet.load(folder)
    return whole(model), state_of(model, key)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    ("declared", "key", "names"),
    [
        ({"localsgd": {"k_steps": 4} | OUTER}, "LocalSGD", ["anchor", "outer"]),
        (SPARSE, "DGC", ["u", "v"]),
        (QUANTIZED, "QuantizedAllReduce", ["residual"]),
    ],
    ids=str,
)
def test_other_ranks_take_over_the_mean_of_what_the_replicas_kept(four, ranks, tmp_path, declared, key, names, other):
    folder = str(tmp_path / "checkpoint")
    saved = four.run(kept, SHARDED | declared, key, folder)
    for params, state in ranks.run(taken_over, OTHERS[other] | declared, key, folder):
        for name, p in params.items():
            torch.testing.assert_close(p, (saved[0][0][name] + saved[2][0][name]) / 2)
        for kind in names:
            assert state[kind].keys() == saved[0][1][kind].keys() != set()
            for name, t in state[kind].items():
                copies = [torch.cat([saved[rank][1][kind][name] for rank in ranks]) for ranks in ((0, 1), (2, 3))]
                assert copies[0].any()
                torch.testing.assert_close(t, sum(copies) / 2)


# --- errors ---------------------------------------------------------------------------------------
def refused(declared):
    try:
        build(declared, net)
    except StrategyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "declared", [HALF, LOCAL, SPARSE, QUANTIZED, {"nccl_comm_num": 2}, {"use_hierarchical_allreduce": True}], ids=str
)
def test_without_replicas_there_is_nothing_to_act_on(four, declared):
    for message in four.run(refused, {"sharding": True} | declared):
        assert "acts between replicas of the model, but `sharding` divides the only one between all 4 ranks" in message
        assert "set a smaller sharding_degree, and hybrid_dp=True, or " in message


def reads_a_weight():
    model, _ = build(SHARDED | SPARSE, wide, momentum)
    with pytest.raises(UsageError, match=r"p.full_tensor\(\) in a loss, while gradients contain momentum"):
        model[2].weight.full_tensor()
    with torch.no_grad():
        return tuple(model[2].weight.full_tensor().shape)


def test_a_loss_cannot_read_a_weight_whose_gradient_contains_momentum(four):
    assert four.run(reads_a_weight) == [(128, 128)] * 4


def released(declared):
    model, o = build(declared)
    for x, y in share(batches(3), fleet.worker_index(), 4):
        fleet.backward(mse_loss(model(x.double()), y.double()), optimizer=o)
        o.step()
        o.zero_grad()
    model, o = fleet.release(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    if fleet.worker_index() == 0:  # alone: nothing is sent any more
        mse_loss(model(torch.ones(2, 6).double()), torch.ones(2, 3).double()).backward()
        o.step()
    return before, type(model).__name__, [type(p).__name__ for p in model.parameters()]


@pytest.mark.parametrize("declared", [HALF, LOCAL, SPARSE, QUANTIZED], ids=str)
def test_release_leaves_a_plain_model_without_hooks(four, declared):
    results = four.run(released, SEGMENTS | declared)
    for before, kind, params in results:
        torch.testing.assert_close(before, results[0][0], rtol=0, atol=0)
        assert (kind, set(params)) == ("Sequential", {"Parameter"})
