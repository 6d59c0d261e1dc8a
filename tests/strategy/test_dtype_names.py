"""A dtype may be given by its short name or as torch's own object; the strategy keeps the long name."""

from __future__ import annotations

from typing import assert_type

import pytest
import torch
from torch import nn

from fleetx import DistributedStrategy, StrategyError, fleet

NAMES = [("bf16", "bfloat16"), (torch.bfloat16, "bfloat16"), ("fp16", "float16"), (torch.float16, "float16")]


@pytest.mark.parametrize("switch", ["amp", "fp16_allreduce"])
@pytest.mark.parametrize(("given", "name"), NAMES, ids=str)
def test_a_dtype_by_any_name(switch, given, name):
    strategy = DistributedStrategy(**{switch: {"dtype": given}})
    assert getattr(strategy, f"{switch}_configs")["dtype"] == name
    strategy.plan()


@pytest.mark.parametrize("given", [torch.float32, "bf", 16, None, ["bf16"]], ids=str)
def test_another_dtype_is_an_error(given):
    with pytest.raises(StrategyError, match="must be 'float16' or 'bfloat16'"):
        DistributedStrategy(amp={"dtype": given})


def test_distribute_returns_the_types_that_it_got():
    fleet.init()
    model = nn.Linear(2, 2)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert_type(model, nn.Linear)  # for type checkers
    assert_type(optimizer, torch.optim.SGD)
    assert (type(model), type(optimizer)) == (nn.Linear, torch.optim.SGD)
