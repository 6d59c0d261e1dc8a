"""An Accelerator that divides the data, with fleet.distribute instead of its `prepare` for the model."""

from __future__ import annotations

import pytest
import torch
from guests import SAME, Model, Samples, as_launched, whole

from fleetx import fleet
from training import sgd

pytest.importorskip("accelerate", reason="accelerate is not installed")


def trained(declared):
    from accelerate import Accelerator

    fleet.init()
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Samples(24), batch_size=2))
    model = Model()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    for batch in loader:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = torch.cat([accelerator.gather_for_metrics(batch["x"]) for batch in loader])
    return whole(model), seen


@pytest.mark.parametrize("k", [1, 2])
def test_data_of_accelerate_with_a_strategy_equals_one_process(ranks, k):
    model, data = Model(), Samples(24)
    optimizer = sgd(model)
    for x, y in zip(data.x.split(4 * k), data.y.split(4 * k), strict=True):
        model(x, y)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, seen in ranks.run(as_launched, trained, {"gradient_merge": {"k_steps": k}}):
        torch.testing.assert_close(found, whole(model), **SAME)
        torch.testing.assert_close(seen, data.x, rtol=0, atol=0)
