"""A reduce-scatter in few bits, against one process that rounds the same values with the same random numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

import wires
from fleetx import StrategyError, fleet
from fleetx.comm import kernel
from fleetx.parts._blocks import decode, encode
from fleetx.parts.sharding.coded import seed_of
from fleetx.verify.observe import sent_since
from training import batches, net, share

BLOCK = 8


def coded(bits, **more):
    return {"sharding": {"gradient_bits": bits, "gradient_block": BLOCK, **more}}


def whole(model):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in model.state_dict().items()}


def build(declared, make=wires.double_net):
    fleet.init()
    model = make()
    return fleet.distribute(model, wires.plain_sgd(model), fleet.DistributedStrategy(**declared))


def trained(declared, data):
    model, o = build(declared)
    for x, y in share(data, fleet.worker_index(), fleet.worker_num()):
        mse_loss(model(x.double()), y.double()).backward()
        o.step()
        o.zero_grad()
    return whole(model)


def rounded(x, bits, random):
    """(blocks, values): rounded up with the probability of what is above the lower neighbour."""
    largest = 2 ** (bits - 1) - 1
    scale = (x.abs().amax(1, keepdim=True).float() / largest).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale + torch.rand(x.shape, generator=random, dtype=x.dtype)).floor() * scale


def padded(t, ranks):
    """The first dimension in equal pieces, as FSDP divides it."""
    out = torch.zeros(math.ceil(len(t) / ranks) * ranks, *t.shape[1:], dtype=t.dtype)
    out[: len(t)] = t
    return out.reshape(ranks, -1)


def simulated(data, bits, ranks, groups=1):
    """The mean over the ranks of each group, and then over the groups."""
    model = wires.double_net()
    o = wires.plain_sgd(model)
    for number, (x, y) in enumerate(data):
        total = 0
        for rank, (a, b) in enumerate(zip(x.chunk(ranks * groups), y.chunk(ranks * groups), strict=True)):
            mse_loss(model(a.double()), b.double()).backward()
            shares = torch.cat([padded(p.grad, ranks) for p in model.parameters()], 1)
            o.zero_grad()
            size = shares.shape[1]
            blocks = torch.zeros(ranks, math.ceil(size / BLOCK) * BLOCK, dtype=torch.float64)
            blocks[:, :size] = shares
            random = torch.Generator().manual_seed(seed_of((number, 0), rank, 0))
            total = total + rounded(blocks.view(-1, BLOCK), bits, random).view(ranks, -1)[:, :size] / ranks / groups
        for p, shares in zip(
            model.parameters(),
            total.split([padded(p.data, ranks).shape[1] for p in model.parameters()], 1),
            strict=True,
        ):
            p.grad = shares.reshape(-1)[: p.numel()].view_as(p).clone()
        o.step()
        o.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_two_ranks_equal_a_simulation(ranks, bits):
    for got in ranks.run(trained, coded(bits), batches()):
        torch.testing.assert_close(got, simulated(batches(), bits, 2), rtol=1e-12, atol=1e-12)


def test_two_groups_of_two_ranks_equal_a_simulation(four):
    for got in four.run(trained, coded(8, sharding_degree=2, hybrid_dp=True), batches()):
        torch.testing.assert_close(got, simulated(batches(), 8, 2, 2), rtol=1e-12, atol=1e-12)


def test_32_bits_are_not_coded(ranks):
    for a, b in zip(
        ranks.run(trained, {"sharding": {"gradient_bits": 32}}, batches()),
        ranks.run(trained, {"sharding": True}, batches()),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_the_mean_of_many_roundings_is_the_value(bits):
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    random = torch.Generator().manual_seed(1)
    found = torch.stack([decode(encode(x, bits, random), bits, torch.float64) for _ in range(4000)])
    step = x.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((found - x).abs() <= step * 1.001).all()
    assert ((found.mean(0) - x).abs() < 0.05 * step).all()  # six standard deviations


def test_a_value_that_is_not_finite_stays_visible():
    x = torch.ones(2, 4)
    x[0, 1] = math.inf
    random = torch.Generator().manual_seed(0)
    assert decode(encode(x, 8, random), 8, torch.float32).isfinite().all(1).tolist() == [False, True]


def large():
    torch.manual_seed(0)
    return nn.Linear(600, 400)


def bytes_per_step(declared):
    model, o = build(declared, large)
    sent = []
    for _ in range(4):
        before = kernel.bytes_sent()
        model(torch.randn(2, 600)).sum().backward()
        o.step()
        o.zero_grad()
        sent.append(sent_since(before))
    return sorted(sent)[1]


@pytest.mark.parametrize(("bits", "share_of_fp32"), [(16, 0.504), (8, 0.254), (4, 0.129)])
def test_the_bytes_of_a_step_are_the_gather_and_the_coded_gradients(ranks, bits, share_of_fp32):
    """Of two ranks, each sends the other half of the parameters and half of the gradients."""
    values = 600 * 400 + 400
    for got in ranks.run(bytes_per_step, {"sharding": {"gradient_bits": bits}}):
        assert got == pytest.approx(values / 2 * 4 * (1 + share_of_fp32), rel=0.02)


def on(model, o, data, start=0):
    for x, y in share(data, fleet.worker_index(), fleet.worker_num())[start:]:
        mse_loss(model(x.double()), y.double()).backward()
        o.step()
        o.zero_grad()
    return whole(model)


def saves(declared, folder):
    model, o = build(declared)
    on(model, o, batches(10)[:5])
    fleet.save(folder)
    return on(model, o, batches(10), 5)


def resumes(declared, folder):
    model, o = build(declared)
    fleet.load(folder)
    return on(model, o, batches(10), 5)


@pytest.mark.parametrize("more", [{}, {"gradient_merge": {"k_steps": 3}}], ids=str)
def test_a_run_resumed_in_the_middle_is_bit_identical(ranks, tmp_path, more):
    folder = str(tmp_path / "checkpoint")
    wanted = ranks.run(saves, coded(8) | more, folder)
    for got, want in zip(ranks.run(resumes, coded(8) | more, folder), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def refused(declared):
    try:
        build(declared, net)
    except StrategyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (
            {"quantized_allreduce": True},
            "or set sharding_configs['gradient_bits'] = 8 instead of `quantized_allreduce`",
        ),
        ({"fp16_allreduce": True}, "or set sharding_configs['gradient_bits'] = 16 instead of `fp16_allreduce`"),
    ],
)
def test_where_there_are_no_replicas_the_error_names_it(ranks, declared, said):
    for message in ranks.run(refused, {"sharding": True} | declared):
        assert said in message


def test_a_block_without_bits_is_an_error():
    with pytest.raises(StrategyError, match="gradient_block has no effect with gradient_bits=32"):
        fleet.DistributedStrategy(sharding={"gradient_block": 64}).plan()
