"""What the ranks exchange, how it is coded and along which path: each combination against one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wires
from fleetx import StrategyError, fleet
from training import assert_equal, batches, resumes, share, train_fleet, weights

QUANTIZED = {"quantized_allreduce": {"bits": 4, "block": 8}}
HALF = {"fp16_allreduce": True}
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.5}


def run(data, declared):
    return train_fleet(data, declared, make=wires.double_net, optimizer=wires.plain_sgd, loop=wires.double_last)


def near(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def code_of(declared, ranks):
    """The simulated wire of this strategy."""
    if "quantized_allreduce" in declared:
        return wires.Quantized(**declared["quantized_allreduce"], ends=ranks)
    if "fp16_allreduce" in declared:
        return wires.Half(torch.float16 if declared is HALF else torch.bfloat16)
    return wires.Dense()


@pytest.mark.parametrize("wire", [{}, {"quantized_allreduce": {"bits": 32}}, {"dgc": {"sparsity": [0.0]}}], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_at_neutral_settings_local_updates_are_data_parallelism(ranks, four, size, wire):
    expected = wires.data_parallel(batches(), 1)
    for got in {2: ranks, 4: four}[size].run(run, batches(), {"localsgd": {"k_steps": 1}} | wire):
        near(got, expected)


@pytest.mark.parametrize("outer", [{}, OUTER], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wire", [{}, HALF, QUANTIZED], ids=str)
def test_the_exchange_of_local_updates_equals_a_simulation(ranks, wire, overlap, outer):
    settings = {"k_steps": 2, "overlap": overlap} | outer
    simulated = wires.local_updates(
        batches(9), 2, 2, code_of(wire, 2),
        lr=outer.get("outer_lr", 1.0), momentum=outer.get("outer_momentum", 0.0), share=0.5 if overlap else None,
    )  # fmt: skip
    for got, expected in zip(ranks.run(run, batches(9), {"localsgd": settings} | wire), simulated, strict=True):
        near(got, expected)


@pytest.mark.parametrize("wire", [QUANTIZED, {"fp16_allreduce": {"dtype": "bfloat16"}}], ids=str)
def test_the_exchange_of_four_ranks_equals_a_simulation(four, wire):
    simulated = wires.local_updates(batches(9), 4, 2, code_of(wire, 4))
    results = four.run(run, batches(9), {"localsgd": {"k_steps": 2}} | wire)
    for got, expected in zip(results, simulated, strict=True):
        if "fp16_allreduce" in wire:  # gloo sums in another order, in half precision
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-3)
        else:
            near(got, expected)


def wide():
    """With a tensor that is large enough for dgc, which compresses float32."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 3))


def wide_double():
    return wide().double()


def run_wide(data, declared):
    return train_fleet(data, declared, make=wide, optimizer=wires.plain_sgd)


@pytest.mark.parametrize("settings", [{}, OUTER, {"overlap": True}, {"overlap": True} | OUTER], ids=str)
def test_a_sparse_outer_gradient_equals_a_simulation(ranks, settings):
    simulated = wires.local_updates(
        batches(9), 2, 2, wires.Sparse(0.1, 16384, 2), make=wide_double,
        lr=settings.get("outer_lr", 1.0), momentum=settings.get("outer_momentum", 0.0),
        share=0.5 if settings.get("overlap") else None,
    )  # fmt: skip
    declared = {"localsgd": {"k_steps": 2} | settings, "dgc": {"sparsity": [0.9]}}
    for got, expected in zip(ranks.run(run_wide, batches(9), declared), simulated, strict=True):
        torch.testing.assert_close(got, {k: v.float() for k, v in expected.items()}, rtol=1e-4, atol=2e-6)


def resumed(settings, wire):
    return resumes({"localsgd": {"k_steps": 4} | settings} | wire)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [OUTER, {"overlap": True}, {"overlap": True} | OUTER], ids=str)
@pytest.mark.parametrize("wire", [HALF, QUANTIZED, {"dgc": {"sparsity": [0.5]}}], ids=str)
def test_a_run_resumed_in_the_middle_is_bit_identical(ranks, settings, wire):
    assert ranks.run(resumed, settings, wire) == [True, True]


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
    ("wire", "bytes_per_value"),
    [({}, 4), (HALF, 2), ({"quantized_allreduce": {"bits": 8}}, 1 + 4 / 256), (QUANTIZED, 0.5 + 4 / 8)],
    ids=str,
)
def test_the_bytes_of_an_exchange_follow_the_formula(ranks, wire, bytes_per_value):
    for got in ranks.run(sent, {"localsgd": {"k_steps": 4}} | wire):  # rounds 1 and 5
        assert got == pytest.approx(2 * (600 * 400 + 400) * bytes_per_value, rel=0.02)


@pytest.mark.parametrize("local", ["localsgd", "adaptive_localsgd"])
@pytest.mark.parametrize("code", ["dgc", "fp16_allreduce", "quantized_allreduce"])
def test_what_is_exchanged_combines_with_every_code(local, code):
    assert fleet.DistributedStrategy(**{local: True, code: True}).plan()


def test_momentum_is_corrected_only_in_gradients():
    with pytest.raises(StrategyError, match="each rank's optimizer has already applied its momentum"):
        fleet.DistributedStrategy(localsgd=True, dgc={"momentum_correction": True}).plan()
    assert fleet.DistributedStrategy(localsgd=True, dgc=True, clip=True).plan()


HALVES = [["0.weight", "0.bias"], ["2.weight", "2.bias", "4.weight", "4.bias"]]


@pytest.mark.parametrize("settings", [{}, OUTER, {"overlap": True}, {"overlap": True} | OUTER], ids=str)
@pytest.mark.parametrize("wire", [{}, HALF, QUANTIZED], ids=str)
def test_fragments_equal_a_simulation(ranks, settings, wire):
    simulated = wires.local_updates(
        batches(14), 2, 4, code_of(wire, 2), fragments=HALVES,
        lr=settings.get("outer_lr", 1.0), momentum=settings.get("outer_momentum", 0.0),
        share=0.5 if settings.get("overlap") else None,
    )  # fmt: skip
    declared = {"localsgd": {"k_steps": 4, "fragments": 2} | settings} | wire
    for got, expected in zip(ranks.run(run, batches(14), declared), simulated, strict=True):
        near(got, expected)


@pytest.mark.parametrize("switch", ["localsgd", "adaptive_localsgd"])
def test_fragments_in_every_round_are_data_parallelism(ranks, switch):
    neutral = {"k_steps": 1} if switch == "localsgd" else {"max_k_steps": 1}
    for got in ranks.run(run, batches(), {switch: neutral | {"fragments": 3}}):
        near(got, wires.data_parallel(batches(), 1))


def peaks(fragments):
    """The bytes that a rank sends in each round."""
    fleet.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    strategy = fleet.DistributedStrategy(localsgd={"k_steps": 8, "fragments": fragments})
    model, optimizer = fleet.distribute(model, wires.plain_sgd(model), strategy)
    traffic, out = fleet._engine(model).network.traffic, []
    for _ in range(17):
        before = traffic.sent
        model(torch.randn(2, 64)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(traffic.sent - before)
    return out


def test_the_peak_of_the_bytes_falls_by_the_number_of_fragments(ranks):
    layer = 64 * 64 * 4
    for got in ranks.run(peaks, 4):
        assert got[0] == 4 * layer  # begin_step
        assert got[1:] == [0, layer] * 8
    for got in ranks.run(peaks, 1):
        assert [n for n in got if n] == [4 * layer] * 3


def fragmented(settings, wire):
    return resumes({"localsgd": {"k_steps": 4, "fragments": 2} | settings} | wire)


@pytest.mark.slow
@pytest.mark.parametrize("wire", [{}, QUANTIZED], ids=str)
@pytest.mark.parametrize("settings", [OUTER, {"overlap": True} | OUTER], ids=str)
def test_a_run_resumed_between_fragments_is_bit_identical(ranks, settings, wire):
    assert ranks.run(fragmented, settings, wire) == [True, True]


def flushed():
    fleet.init()
    model = wires.double_net()
    strategy = fleet.DistributedStrategy(localsgd={"k_steps": 4, "fragments": 2})
    model, optimizer = fleet.distribute(model, wires.plain_sgd(model), strategy)
    data = share(batches(12), fleet.worker_index(), 2)
    for x, y in data[:3]:
        wires.double_last(model, optimizer, x, y)
    fleet.flush()
    after, last = weights(model), []
    for x, y in data[3:]:
        wires.double_last(model, optimizer, x, y)
        last.append(list(fleet._engine(model).state["LocalSGD"]["last"]))
    return after, last


def test_after_a_flush_the_ranks_are_equal_and_fragments_take_turns_again(ranks):
    (first, last), (second, _) = ranks.run(flushed)
    assert_equal(first, second)
    assert last[:6] == [[3, 3], [5, 3], [5, 3], [5, 7], [5, 7], [9, 7]]
