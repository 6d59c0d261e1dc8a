"""What the ranks exchange, how it is coded and along which path: each combination against one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wires
from fleetx import StrategyError, fleet
from training import batches, resumes, train_fleet

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
