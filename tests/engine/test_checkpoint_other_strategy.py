"""A run under one strategy continues under another: ranks that differed must not differ silently from then on."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from fleetx import NumbersError, fleet
from fleetx.comm.session import current
from training import batches, net, share, weights, zero_last

LOCAL = {"localsgd": {"k_steps": 100, "begin_step": 1}}
ISLANDS = {"localsgd": {"k_steps": 100, "begin_step": 1, "group_size": 2}}


sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def build(declared, make=sgd, model_of=net):
    warnings.filterwarnings("ignore", message="the checkpoint has state of `localsgd`")
    fleet.init()
    current().entries.clear()
    model = model_of()
    return fleet.distribute(model, make(model.parameters()), fleet.DistributedStrategy(**declared))


def train(model, optimizer, first, last):
    for x, y in share(batches(8, size=8), fleet.worker_index(), fleet.worker_num())[first:last]:
        zero_last(model, optimizer, x, y)


def state_of(model, optimizer):
    named = (
        (n, optimizer.state[p].get("momentum_buffer", optimizer.state[p].get("exp_avg")))
        for n, p in model.named_parameters()
    )
    return weights(model), {name: m.clone() for name, m in named}


def continued(folder, before, after, make=sgd):
    """(parameters, momentum) at the save, after the load, and three updates later."""
    model, optimizer = build(before, make)
    train(model, optimizer, 0, 4)
    saved = state_of(model, optimizer)
    fleet.save(folder)
    model, optimizer = build(after, make)
    fleet.load(folder)
    loaded = state_of(model, optimizer)
    train(model, optimizer, 4, 7)
    return saved, loaded, state_of(model, optimizer)


def mean(ranks):
    return {
        name: torch.stack([one[name].double() for one in ranks]).mean(0).to(ranks[0][name].dtype) for name in ranks[0]
    }


exactly = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.parametrize(
    "after", [{}, {"gradient_merge": {"k_steps": 3}}, {"ema": True}], ids=lambda a: "".join(a) or "none"
)
def test_after_localsgd_all_ranks_continue_from_the_mean(ranks, tmp_path, after):
    found = ranks.run(continued, tmp_path / "c", LOCAL, after)
    saved, loaded, final = zip(*found, strict=True)
    assert any(not torch.equal(saved[0][0][name], saved[1][0][name]) for name in saved[0][0])
    for parameters, momentum in loaded:
        exactly(parameters, mean([one for one, _ in saved]))
        exactly(momentum, mean([one for _, one in saved]))
    exactly(final[0][0], final[1][0])


def test_after_localsgd_with_adam(ranks, tmp_path):
    found = ranks.run(continued, tmp_path / "c", LOCAL, {}, partial(torch.optim.Adam, lr=0.01))
    exactly(found[0][1:], found[1][1:])


def test_islands_continue_from_their_own_mean(four, tmp_path):
    found = four.run(continued, tmp_path / "c", LOCAL, ISLANDS)
    saved, loaded, final = zip(*found, strict=True)
    for first in (0, 2):
        for rank in (first, first + 1):
            exactly(loaded[rank][0], mean([saved[first][0], saved[first + 1][0]]))
        exactly(final[first], final[first + 1])
    assert any(not torch.equal(final[0][0][name], final[2][0][name]) for name in final[0][0])


def test_after_islands_all_ranks_continue_from_the_mean(four, tmp_path):
    found = four.run(continued, tmp_path / "c", ISLANDS, {})
    saved, loaded, final = zip(*found, strict=True)
    for (parameters, momentum), last in zip(loaded, final, strict=True):
        exactly(parameters, mean([one for one, _ in saved]))
        exactly(momentum, mean([one for _, one in saved]))
        exactly(last, final[0])


def test_under_the_same_strategy_each_rank_gets_its_own(ranks, tmp_path):
    for saved, loaded, _ in ranks.run(continued, tmp_path / "c", LOCAL, LOCAL):
        exactly(loaded, saved)


def shards_of_replicas(folder):
    """Shards that every replica updates on its own, then with the mean of the gradients."""
    shards = {"sharding": {"sharding_degree": 2, "hybrid_dp": True}}
    model, optimizer = build(shards | LOCAL)
    train(model, optimizer, 0, 4)
    fleet.save(folder)
    model, optimizer = build(shards)
    fleet.load(folder)
    train(model, optimizer, 4, 7)
    return [p.full_tensor() for p in model.parameters()], [p.to_local().clone() for p in model.parameters()]


def test_replicas_of_shards_continue_from_the_mean(four, tmp_path):
    found = four.run(shards_of_replicas, tmp_path / "c")
    for rank in (0, 1):
        exactly(found[rank][1], found[rank + 2][1])
    exactly(found[0][0], found[3][0])


def released():
    """Released from localsgd, then trained under no strategy."""
    model, optimizer = build(LOCAL)
    train(model, optimizer, 0, 4)
    before = state_of(model, optimizer)
    fleet.release(model)
    plain = state_of(model, optimizer)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy())
    train(model, optimizer, 4, 7)
    return before, plain, state_of(model, optimizer)


def test_what_localsgd_releases_is_the_mean_momentum_included(ranks):
    before, plain, final = zip(*ranks.run(released), strict=True)
    for parameters, momentum in plain:
        torch.testing.assert_close(parameters, mean([one for one, _ in before]))
        torch.testing.assert_close(momentum, mean([one for _, one in before]))
    exactly(plain[0], plain[1])
    exactly(final[0], final[1])


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias


class Numbers(torch.optim.Optimizer):
    """Keeps a Python number for each parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                seen = self.state[p]["seen"] = self.state[p].get("seen", 0.0) + p.grad.norm().item()
                p.add_(p.grad, alpha=-0.05 / (1 + seen))


class OneBranch(nn.Module):
    """Each rank trains a branch of its own, in bfloat16; LAMB keeps its state in float32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        self.bfloat16()

    def forward(self, x):
        return self.branches[fleet.worker_index()](x.bfloat16()).float()


ODD = {
    "complex": (Complex, partial(torch.optim.Adam, lr=0.05), {}),
    "numbers": (net, Numbers, {}),
    "one branch": (OneBranch, partial(torch.optim.Adam, lr=0.01), {"lamb": True, "find_unused_parameters": True}),
}


def odd_released(name, folder):
    """Parameters and state after a release from localsgd, and after a save and a load."""
    (make, optimize, declared), found = ODD[name], []
    for load in (False, True):
        model, optimizer = build(LOCAL | declared, optimize, make)
        train(model, optimizer, 0, 3)
        if load:
            fleet.save(folder)
            model, optimizer = build(declared, optimize, make)
            fleet.load(folder)
        else:
            fleet.release(model)
        found.append([list(model.parameters()), [dict(optimizer.state[p]) for p in model.parameters()]])
    return copy.deepcopy(found)


@pytest.mark.parametrize("name", ODD)
def test_a_release_and_a_load_take_the_same_mean_of_odd_states(ranks, tmp_path, name):
    with_rank_0, with_rank_1 = ranks.run(odd_released, name, tmp_path / "c")
    for released, loaded in (with_rank_0, with_rank_1):
        torch.testing.assert_close(released, loaded)
    exactly(with_rank_0, with_rank_1)


def changed_after_the_load(folder):
    model, optimizer = build({})
    train(model, optimizer, 0, 2)
    fleet.save(folder)
    fleet.load(folder)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"].add_(fleet.worker_index())
    try:
        train(model, optimizer, 2, 3)
    except NumbersError as error:
        return str(error)


def test_a_change_after_a_load_on_one_rank_only_is_an_error_after_the_first_update(ranks, tmp_path):
    for told in ranks.run(changed_after_the_load, tmp_path / "c"):
        assert "the parameters of ranks 0, 1 differ" in told
        assert "the first update after fleet.load" in told


def loaded_on_one_rank():
    model, optimizer = build({})
    train(model, optimizer, 0, 2)
    if fleet.worker_index() == 0:
        optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 2, 4)
    return weights(model)


def test_one_rank_may_load_its_own_state_dict(ranks):
    first, second = ranks.run(loaded_on_one_rank)
    exactly(first, second)
