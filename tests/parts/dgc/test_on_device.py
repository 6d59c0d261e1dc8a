"""DGC on an accelerator: what is decoded, u and v against the codec of the CPU; messages of one length."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from codec_tools import HALF, same_bits, tensors, unbuilt

import covering
from fleetx import fleet
from fleetx.comm import session
from fleetx.comm.paths import Network
from fleetx.parts.dgc import codec, native, on_device, payload, plain, selection
from fleetx.parts.dgc.payload import Update

ON_CPU = plain if unbuilt else native
with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
SELECTIONS = ["torch", "triton"]
cases = partial(covering.cases, marks=lambda value: [with_triton] if value == "triton" else [])
SIZES = {1: [1], 7: [3], 4096: [1, 4095], 10_000: [10, 2500, 10_000]}  # elements and how many are sent
PAIRS = [(n, k) for n, ks in SIZES.items() for k in ks]


@pytest.fixture(autouse=True)
def _chosen(request, monkeypatch):
    """Triton's kernels, in its interpreter, where a test asks for them."""
    asked = request.node.callspec.params.get("by") if hasattr(request.node, "callspec") else None
    monkeypatch.setattr(
        selection, "selector", lambda update: selection.loaded().select if asked == "triton" else selection.select
    )


def updates(g, u, v, k, half, *, momentum=0.0, factor=1.0, decay=0.0, p=None, norm_limit=None):
    """The same update twice, each with its own u and v."""
    made = Update(
        g, u, v, u.clone(), v.clone(), momentum=momentum, factor=factor, decay=decay, norm_limit=norm_limit, half=half,
        k=k, p=p,
    )  # fmt: skip
    return made, replace(made, u_out=u.clone(), v_out=v.clone())


def added(update, *messages, scale=0.5):
    out = torch.zeros(update.n)
    layout = on_device.MessageLayout(update.n, update.k, update.half)
    on_device.decode_add(torch.stack(messages), out, scale, layout)
    return out


def check(device, cpu, exact=True):
    data, message = ON_CPU.encode(cpu), on_device.encode(device)
    expected = torch.zeros(cpu.n)
    for _ in range(2):
        codec.decode_add(data, expected, 0.5, backend=ON_CPU)
    found = added(device, message, message)
    for a, b in ((found, expected), (device.u_out, cpu.u_out), (device.v_out, cpu.v_out)):
        assert same_bits(a, b) if exact else torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    return message


@cases(pair=PAIRS, half=HALF, by=SELECTIONS)
def test_values_and_residuals_are_those_of_the_cpu_bit_for_bit(pair, half, by):
    n, k = pair
    check(*updates(*tensors(n), k, half))


@cases(pair=PAIRS, half=HALF, by=SELECTIONS)
def test_of_equal_values_the_first_are_sent(pair, half, by):
    n, k = pair
    g = torch.randint(-3, 4, (n,), generator=torch.Generator().manual_seed(0)).float()
    check(*updates(g, torch.zeros(n), torch.zeros(n), k, half))


@cases(nonzero=[0, 1, 50, 150], half=HALF, by=SELECTIONS)
def test_a_message_is_as_long_whatever_it_holds(nonzero, half, by):
    n, k = 5000, 100
    g, u = torch.zeros(n), torch.ones(n)
    g[torch.randperm(n)[:nonzero]] = torch.arange(1.0, nonzero + 1)
    # u stays where nothing is sent, although its place in the message is taken
    device, cpu = updates(g, u, torch.zeros(n), k, half)
    device, cpu = (replace(update, u=u * 0, u_out=u.clone()) for update in (device, cpu))
    assert len(check(device, cpu)) == on_device.MessageLayout(n, k, half).bytes


@cases(norm_limit=[None, 1e9, 3.0], decay=[0.0, 0.03], by=SELECTIONS)
def test_momentum_decay_and_the_norm_limit(norm_limit, decay, by):
    g, u, v, p = tensors(9000, 4)
    settings = {"momentum": 0.8, "factor": -0.25, "decay": decay, "norm_limit": norm_limit}
    check(*updates(g, u, v, 90, False, p=p if decay else None, **settings), exact=False)


@cases(bad=[float("nan"), float("inf")], k=[1, 50, 5000], half=HALF, by=SELECTIONS)
def test_a_number_that_is_not_finite_reaches_every_rank(bad, k, half, by):
    g, u, v = tensors(5000)
    good, _ = updates(g, u, v, k, half)
    fine = on_device.encode(good)
    g = g.clone()
    g[4321] = bad
    update, _ = updates(g, u, v, k, half)
    assert not added(update, fine, on_device.encode(update)).isfinite().all()
    assert added(update, fine).isfinite().all()


def test_pieces_do_not_change_the_selection(monkeypatch):
    g, u, v = tensors(10_000)
    whole, parted = updates(g, u, v, 300, True)
    expected = selection.select(whole)
    monkeypatch.setattr(selection, "_PIECE", 999)
    for a, b in zip(selection.select(parted), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("sparsity", [0.999, 0.99, 0.75])
def test_a_message_takes_little_more_room_than_a_payload(sparsity, half):
    n = 200_000
    k = payload.wanted(n, sparsity)
    device, cpu = updates(*tensors(n), k, half)
    assert len(on_device.encode(device)) <= 1.04 * len(ON_CPU.encode(cpu))


def test_messages_are_decoded_a_few_at_a_time_without_a_difference(monkeypatch):
    update, _ = updates(*tensors(5000), 100, True)
    messages = [on_device.encode(replace(update, g=update.g * i)) for i in range(5)]
    expected = added(update, *messages)
    monkeypatch.setattr(on_device, "_AT_ONCE", 250)
    assert same_bits(added(update, *messages), expected)


# --- between ranks ------------------------------------------------------------------------------------
def gathered(inside):
    fleet.init()
    network = Network(session.current().here())
    network.messages, network.inside = True, inside
    network.open()
    rank = fleet.worker_index()
    rows = network.path(0).gather_equal(torch.full((5,), rank, dtype=torch.uint8))
    network.close()
    return rows.tolist(), network.traffic.sent


@pytest.mark.slow
def test_messages_of_one_length_reach_every_rank(four):
    expected = [[rank] * 5 for rank in range(4)]
    assert four.run(gathered, 1) == [(expected, 3 * 5)] * 4
    # in a hierarchy only the first rank of each host sends between them: one message of two ranks
    assert four.run(gathered, 2) == [(expected, 10), (expected, 0), (expected, 10), (expected, 0)]
