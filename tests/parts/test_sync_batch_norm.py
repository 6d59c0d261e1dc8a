"""BatchNorm over all ranks equals BatchNorm on the full batch, in forward, backward and statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fleetx import StrategyError, fleet
from training import weights


def _conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 2))


def _flat():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False)
    )


MODELS = {"conv": (_conv, (8, 3, 6, 6)), "flat": (_flat, (8, 6))}


def _data(shape):
    g = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=g) * 2 + 5 for _ in range(4)]


def _loss(out):
    return (out**3).sum() / 8  # a sum: unequal shares still add up to the full batch


def _train_on_ranks(name, cut):
    make, shape = MODELS[name]
    fleet.init()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(sync_batch_norm=True))
    for x in _data(shape):
        mine = x[:cut] if fleet.worker_index() == 0 else x[cut:]
        _loss(model(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("cut", [4, 3])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_equal_one_with_the_full_batch_even_with_unequal_shares(ranks, name, cut):
    found = ranks.run(_train_on_ranks, name, cut)
    make, shape = MODELS[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # ranks average their gradients, which is half the sum
    for x in _data(shape):
        _loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0], weights(model), rtol=1e-4, atol=1e-5)


def test_one_rank_is_plain_batchnorm_bit_for_bit():
    x = _data((8, 3, 6, 6))[0]
    fleet.init()
    model = _conv()
    model, _ = fleet.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(sync_batch_norm=True)
    )
    assert torch.equal(model(x), _conv()(x))


def test_evaluation_does_not_communicate(ranks):
    assert ranks.run(_evaluate_on_rank_0_only)[0] is True


def _evaluate_on_rank_0_only():
    fleet.init()
    model = _conv()
    model, _ = fleet.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(sync_batch_norm=True)
    )
    if fleet.worker_index() == 0:
        model.eval()
        with torch.no_grad():
            return bool(model(_data((8, 3, 6, 6))[0]).isfinite().all())
    return None


class Fused(nn.BatchNorm1d):
    """Has its own forward, like norms with a fused activation."""

    def forward(self, x):
        return super().forward(x).relu()


def test_a_norm_with_its_own_forward_is_an_error():
    fleet.init()
    model = nn.Sequential(nn.Linear(6, 4), Fused(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StrategyError, match="with '1' is not supported yet: Fused has its own forward"):
        fleet.distribute(model, optimizer, fleet.DistributedStrategy(sync_batch_norm=True))


def test_it_works_with_amps_lists_and_recompute_on_the_same_module(ranks):
    """Whichever part wraps a module first, the norm is innermost, its precision around it, recompute outermost."""
    want = ranks.run(_wrapped, {})
    for found in ranks.run(_wrapped, {"recompute": {"checkpoints": ["1"]}}):
        torch.testing.assert_close(found, want[0], rtol=0, atol=0)


def _wrapped(extra):
    fleet.init()
    model = _flat()
    declared = {"sync_batch_norm": True, "amp": {"dtype": "bfloat16", "custom_black_list": ["1"]}} | extra
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**declared))
    seen = []
    model[2].register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    for x in _data((8, 6)):
        _loss(model(x.chunk(2)[fleet.worker_index()])).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(seen) == {torch.float32}
    return weights(model)


def test_a_rank_without_samples_takes_part(ranks):
    found = ranks.run(_train_on_ranks, "conv", 8)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert all(v.isfinite().all() for v in found[0].values())


def test_evaluation_without_running_statistics_does_not_communicate(ranks):
    assert ranks.run(_evaluate_untracked)[0] is True


def _evaluate_untracked():
    fleet.init()
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = fleet.distribute(model, optimizer, fleet.DistributedStrategy(sync_batch_norm=True))
    if fleet.worker_index() == 0:
        with torch.no_grad():
            return bool(model.eval()(torch.randn(4, 6)).isfinite().all())
    return None


def test_gradients_of_gradients_are_an_error(ranks):
    assert all("once_differentiable" in message for message in ranks.run(_twice))


def _twice():
    fleet.init()
    model = _flat()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = fleet.distribute(model, optimizer, fleet.DistributedStrategy(sync_batch_norm=True))
    x = torch.randn(4, 6, requires_grad=True)
    (g,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
    try:
        g.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_memory_budget_is_an_error_because_each_rank_could_recompute_other_modules():
    """Four ranks with other plans waited for each other forever, some in a forward that others did not run again."""
    with pytest.raises(
        StrategyError, match=r"does not support `sync_batch_norm` yet, which makes modules wait for all"
    ):
        fleet.DistributedStrategy(sync_batch_norm=True, recompute={"memory_budget": "min"}).plan()
