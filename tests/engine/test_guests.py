"""Code that also manages the model: it works, or raises one clear error."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from fleetx import UsageError, fleet
from training import net, sgd


def wrapped(settings):
    fleet.init()
    model = net()
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**settings))
    outer = DistributedDataParallel(model)
    with pytest.raises(UsageError, match=r"wrapped in DistributedDataParallel, .* remove the wrapper") as caught:
        outer(torch.randn(4, 6))
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    mse_loss(model(x), y).backward()  # without the wrapper it trains
    return str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"gradient_merge": {"k_steps": 2}}, {"localsgd": {"k_steps": 2}}], ids=str)
def test_ddp_around_a_distributed_model_is_an_error(ranks, settings):
    ranks.run(wrapped, settings)
