from __future__ import annotations

import itertools

import pytest
import torch

import wires
from fleetx import StrategyError, UsageError, fleet
from fleetx.parts._blocks import BlockLayout, decode, encode, row_bytes
from training import assert_equal, batches, net, resumes, share, train, train_fleet, weights, zero_last


@pytest.mark.parametrize("bits", [4, 8])
def test_a_value_is_off_by_at_most_half_a_step_of_its_block(bits):
    values = torch.randn(50, 16, dtype=torch.float64) * torch.logspace(-30, 30, 50, dtype=torch.float64).unsqueeze(1)
    values[7] = 0
    step = values.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    rows = encode(values, bits)
    assert rows.shape == (50, row_bytes(16, bits))
    assert ((decode(rows, bits, torch.float64) - values).abs() <= step * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_block_that_is_not_finite_stays_so_and_leaves_the_others_alone(bits, bad):
    values = torch.ones(2, 4)
    values[1, 2] = bad
    good, broken = decode(encode(values, bits), bits, torch.float32)
    torch.testing.assert_close(good, torch.ones(4))
    assert not broken.isfinite().any()


def test_what_a_value_is_rounded_to_does_not_depend_on_its_bucket():
    a, b = torch.randn(10), torch.randn(7)
    both, alone = BlockLayout([7, 10], 4, 3), BlockLayout([10], 4, 1)
    assert both.rows == 6
    blocks = decode(encode(both.blocks([b, a], torch.float32), 8), 8, torch.float32)
    torch.testing.assert_close(
        both.values(blocks)[1],
        alone.values(decode(encode(alone.blocks([a], torch.float32), 8), 8, torch.float32))[0],
        rtol=0,
        atol=0,
    )


def run(data, declared):
    return train_fleet(data, declared, make=wires.double_net, optimizer=wires.plain_sgd, loop=wires.double_last)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("pool", ["ranks", "four"])
def test_gradients_equal_a_simulation_in_one_process(request, pool, bits):
    ranks = request.getfixturevalue(pool)
    size = 2 if pool == "ranks" else 4
    expected = wires.data_parallel(batches(6), size, wires.Quantized(bits, 8, size))
    for got in ranks.run(run, batches(6), {"quantized_allreduce": {"bits": bits, "block": 8}}):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_32_bits_are_data_parallelism(ranks):
    for got in ranks.run(run, batches(), {"quantized_allreduce": {"bits": 32}}):
        torch.testing.assert_close(got, wires.data_parallel(batches(), 1), rtol=1e-12, atol=1e-12)


def test_behind_a_hierarchy_only_the_leaders_code(four):
    declared = {"quantized_allreduce": {"block": 8}, "use_hierarchical_allreduce": True}
    declared["hierarchical_allreduce_inter_nranks"] = 2
    expected = wires.data_parallel(batches(6), 4, wires.Quantized(8, 8, 2, inside=2))
    for got in four.run(run, batches(6), declared):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def sent(declared, rounds):
    """Bytes that a rank sends per round, and the values in the model."""
    fleet.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 40))
    model, optimizer = fleet.distribute(model, wires.plain_sgd(model), fleet.DistributedStrategy(**declared))
    for _ in range(rounds):
        model(torch.randn(2, 200)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return fleet._engine(model).network.traffic.sent / rounds, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("bits", "most"), [(8, 0.27), (4, 0.14)])
def test_the_bytes_on_the_wire_follow_the_formula(four, bits, most):
    for got, values in four.run(sent, {"quantized_allreduce": {"bits": bits}}, 3):
        formula = 2 * 3 / 4 * values * (bits / 8 + 4 / 256)
        assert formula <= got <= 1.02 * formula
        assert got <= most * 2 * 3 / 4 * values * 4


def resumed():
    return all(resumes({"quantized_allreduce": {"bits": bits, "block": 8}}) for bits in (4, 8))


def test_a_resumed_run_is_bit_identical(ranks):
    assert ranks.run(resumed) == [True, True]


def overflowing():
    """Parameters and residuals before and after a step whose gradient is not finite on rank 1."""
    fleet.init()
    model = net()
    declared = {"amp": {"dtype": "float16", "init_loss_scaling": 1024.0}, "quantized_allreduce": {"block": 8}}
    model, optimizer = fleet.distribute(model, wires.plain_sgd(model), fleet.DistributedStrategy(**declared))
    data = share(batches(3), fleet.worker_index(), 2)
    zero_last(model, optimizer, *data[0])
    kept = fleet._engine(model).state["QuantizedAllReduce"]["residual"]
    before = weights(model), {name: e.clone() for name, e in kept.items()}
    x, y = data[1]
    zero_last(model, optimizer, x * (1e30 if fleet.worker_index() else 1.0), y)
    return before, (weights(model), {name: e.clone() for name, e in kept.items()})


def test_an_overflow_on_one_rank_changes_neither_parameters_nor_residuals(ranks):
    for before, after in ranks.run(overflowing):
        for old, new in zip(before, after, strict=True):
            assert_equal(old, new)
        assert any(e.any() for e in before[1].values())


def twice():
    fleet.init()
    model = net()
    strategy = fleet.DistributedStrategy(quantized_allreduce=True)
    model, _ = fleet.distribute(model, wires.plain_sgd(model), strategy)
    try:
        for x, _ in batches(2):
            model(x).sum().backward()
    except UsageError as error:
        return str(error)
    return ""


def test_a_second_backward_before_the_step_is_an_error(ranks):
    for message in ranks.run(twice):
        assert "a second backward before optimizer.step()" in message


@pytest.mark.parametrize("others", [{"gradient_merge": {"k_steps": 2}}, {"clip": {"clip_norm": 0.1}}], ids=str)
def test_what_is_rounded_off_is_not_lost(ranks, others):
    """After many equal gradients, the mean of what was applied is the gradient."""
    data = batches(1) * 60
    expected = train_one(data, others)
    for got in ranks.run(run_slow, data, others | {"quantized_allreduce": {"bits": 4, "block": 8}}):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-3)


def slow_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def train_one(data, others):
    return train_fleet(data, others, optimizer=slow_sgd)


def run_slow(data, declared):
    return train_fleet(data, declared, optimizer=slow_sgd)


@pytest.mark.parametrize("settings", [{"bits": 16}, {"block": 3}, {"block": 0}], ids=str)
def test_bad_settings(settings):
    with pytest.raises(StrategyError, match=next(iter(settings))):
        fleet.DistributedStrategy(quantized_allreduce=settings).plan()


def test_a_value_is_compressed_once():
    for a, b in itertools.combinations(["dgc", "fp16_allreduce", "quantized_allreduce"], 2):
        with pytest.raises(StrategyError, match=f"`{a}` and `{b}` both compress what the ranks send, and a value can"):
            fleet.DistributedStrategy(**{a: True, b: True}).plan()


def test_one_rank_sends_nothing():
    assert_equal(train_fleet(batches(), {"quantized_allreduce": True}), train(batches()))


def built():
    fleet.init()
    model = net()
    strategy = fleet.DistributedStrategy(quantized_allreduce={"block": 8})
    return fleet.distribute(model, wires.plain_sgd(model), strategy)


def saved_on_two(folder):
    model, optimizer = built()
    for x, y in share(batches(3), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
    fleet.save(folder)
    return optimizer.state_dict()["fleetx"]["parts"]["QuantizedAllReduce"]["residual"]


def test_another_number_of_ranks_takes_over_the_mean_of_what_was_rounded_off(ranks, tmp_path):
    first, second = ranks.run(saved_on_two, tmp_path / "saved")
    _, optimizer = built()
    fleet.load(tmp_path / "saved")
    found = optimizer.state_dict()["fleetx"]["parts"]["QuantizedAllReduce"]["residual"]
    torch.testing.assert_close(found, {name: (t + second[name]) / 2 for name, t in first.items()})
