"""BatchNorm over all ranks is BatchNorm on the whole batch, in forward, backward and statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fleetx import fleet
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
    return (out**3).sum() / 8  # a sum: unequal shares still add up to the whole batch


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
def test_two_ranks_equal_one_with_the_whole_batch_even_with_unequal_shares(ranks, name, cut):
    found = ranks.run(_train_on_ranks, name, cut)
    make, shape = MODELS[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # ranks average their gradients: half of the sum
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


def test_evaluation_communicates_nothing(ranks):
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
