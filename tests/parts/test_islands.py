"""Data parallelism within an island of ranks, local updates between islands."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import wires
from covering import covering
from fleetx import StrategyError, fleet
from training import batches, resumes, share, train_fleet, weights, zero_last

QUANTIZED = {"quantized_allreduce": {"bits": 8, "block": 8}}
HALF = {"fp16_allreduce": True}
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.5}


def run(data, declared):
    return train_fleet(data, declared, make=wires.double_net, optimizer=wires.plain_sgd, loop=wires.double_last)


@pytest.mark.parametrize(
    ("switch", "size", "wire"),
    covering(
        ["localsgd", "adaptive_localsgd"],
        [2, 4, "host"],
        [{}, {"quantized_allreduce": {"bits": 32}}, {"dgc": {"sparsity": [0.0]}}],
        strength=1,
    ),
)
def test_at_neutral_settings_islands_are_data_parallelism(four, switch, size, wire):
    neutral = {"k_steps": 1} if switch == "localsgd" else {"max_k_steps": 1}
    for got in four.run(run, batches(), {switch: neutral | {"group_size": size}} | wire):
        torch.testing.assert_close(got, wires.data_parallel(batches(), 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", [{}, OUTER, {"overlap": True} | OUTER], ids=str)
@pytest.mark.parametrize("wire", [{}, HALF, QUANTIZED], ids=str)
def test_two_islands_equal_a_simulation(four, settings, wire):
    code = wires.Half() if wire is HALF else wires.Quantized(8, 8, 2) if wire is QUANTIZED else None
    simulated = wires.local_updates(
        batches(9), 4, 2, code, island=2,
        lr=settings.get("outer_lr", 1.0), momentum=settings.get("outer_momentum", 0.0),
        share=0.5 if "overlap" in settings else None,
    )  # fmt: skip
    results = four.run(run, batches(9), {"localsgd": {"k_steps": 2, "group_size": 2} | settings} | wire)
    for rank, got in enumerate(results):
        torch.testing.assert_close(got, simulated[rank // 2], rtol=1e-12, atol=1e-12)


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 3))


def wide_double():
    return wide().double()


def run_wide(data, declared):
    return train_fleet(data, declared, make=wide, optimizer=wires.plain_sgd)


def test_islands_with_a_sparse_outer_gradient_equal_a_simulation(four):
    simulated = wires.local_updates(batches(7), 4, 2, wires.Sparse(0.1, 16384, 2), island=2, make=wide_double)
    declared = {"localsgd": {"k_steps": 2, "group_size": 2}, "dgc": {"sparsity": [0.9]}}
    for rank, got in enumerate(four.run(run_wide, batches(7), declared)):
        expected = {k: v.float() for k, v in simulated[rank // 2].items()}
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-6)


def sent(declared):
    fleet.init()
    torch.manual_seed(0)
    model = nn.Linear(600, 400)
    model, optimizer = fleet.distribute(model, wires.plain_sgd(model), fleet.DistributedStrategy(**declared))
    for _ in range(5):
        model(torch.randn(2, 600)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return fleet._engine(model).network.traffic.sent


@pytest.mark.parametrize(
    ("wire", "bytes_per_value"), [({}, 4), (HALF, 2), ({"quantized_allreduce": True}, 1 + 4 / 256)]
)
def test_only_the_leaders_of_islands_send_to_each_other(four, wire, bytes_per_value):
    got = four.run(sent, {"localsgd": {"k_steps": 4, "group_size": 2}} | wire)  # in rounds 1 and 5
    assert got[0] == got[2] == pytest.approx(2 * (600 * 400 + 400) * bytes_per_value, rel=0.02)
    assert got[1] == got[3] == 0


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x):
        return self.body(x)


def drift(declared):
    """The weights after each round."""
    fleet.init()
    model = Normed()
    model, optimizer = fleet.distribute(model, wires.plain_sgd(model), fleet.DistributedStrategy(**declared))
    out = []
    for x, y in share(batches(4, 8), fleet.worker_index(), 4):
        zero_last(model, optimizer, x, y)
        out.append(weights(model))
    return out


def test_an_island_is_equal_after_every_round_and_all_are_after_an_average(four):
    results = four.run(drift, {"localsgd": {"k_steps": 3, "group_size": 2}})
    for number, (a, b, c, d) in enumerate(zip(*results, strict=True), start=1):
        for name in a:
            assert torch.equal(a[name], b[name])
            assert torch.equal(c[name], d[name])
        everywhere = all(torch.equal(a[name], c[name]) for name in a)
        assert everywhere == (number in (1, 4))


def weighted(data):
    """Rank 0 of each island has three times as many items as rank 1."""
    fleet.init()
    model = wires.double_net()
    strategy = fleet.DistributedStrategy(localsgd={"k_steps": 100, "group_size": 2})
    model, optimizer = fleet.distribute(model, wires.plain_sgd(model), strategy)
    for x, y in data[1:]:
        island, rank = divmod(fleet.worker_index(), 2)
        mine = slice(4 * island + 3 * rank, 4 * island + 3 + rank)
        fleet.weight(3 - 2 * rank)
        mse_loss(model(x[mine].double()), y[mine].double()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_weights_count_within_an_island(four):
    """Until the second average, an island trains as one process with its items."""
    data = batches(2, 8)
    simulated = wires.local_updates(data[1:], 2, 100)
    for got in four.run(weighted, data):
        torch.testing.assert_close(got, simulated[0], rtol=1e-12, atol=1e-12)


class Branches(nn.Module):
    """Each rank takes one of three branches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x, branch):
        return self.branches[branch](x)


def branching():
    """Islands (0, 1) and (2, 3) use branches 0 and 1, and 2."""
    fleet.init()
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    strategy = fleet.DistributedStrategy(localsgd={"k_steps": 100, "group_size": 2}, find_unused_parameters=True)
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    before = weights(model)
    for x, y in batches(3)[:3]:
        mse_loss(model(x, min(fleet.worker_index(), 2)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, weights(model)


def test_what_nobody_in_an_island_uses_does_not_decay_there(four):
    """After round 1, which averages."""
    results = [after for _, after in four.run(branching)]
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name])
        assert torch.equal(results[2][name], results[3][name])
        assert not torch.equal(results[0][name], results[2][name])


def resumed(settings):
    return resumes({"localsgd": {"k_steps": 4, "group_size": 2} | settings} | QUANTIZED)


@pytest.mark.parametrize("settings", [OUTER, {"overlap": True} | OUTER], ids=str)
def test_a_run_resumed_in_the_middle_is_bit_identical(four, settings):
    assert four.run(resumed, settings) == [True] * 4


def refused(declared):
    try:
        train_fleet(batches(1), declared)
    except StrategyError as error:
        return str(error)
    return ""


def test_islands_of_unequal_size_are_an_error(four):
    for message in four.run(refused, {"localsgd": {"group_size": 3}}):
        assert "localsgd_configs['group_size'] = 3 does not divide 4 ranks: use 1, 2 or 4" in message


def merged(data):
    """The second rank of each island has no batch in the last step of the window."""
    fleet.init()
    model = wires.double_net()
    strategy = fleet.DistributedStrategy(localsgd={"k_steps": 100, "group_size": 2}, gradient_merge={"k_steps": 2})
    model, optimizer = fleet.distribute(model, wires.plain_sgd(model), strategy)
    for number, (x, y) in enumerate(data):
        x, y = (t.chunk(2)[fleet.worker_index() % 2].double() for t in (x, y))
        if number % 2 == 0 or fleet.worker_index() % 2 == 0:
            mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_a_rank_without_a_batch_updates_with_its_island(four):
    results = four.run(merged, batches(4))
    for name, value in results[0].items():
        assert all(torch.equal(value, other[name]) for other in results[1:])
