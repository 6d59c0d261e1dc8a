"""Models with gradients or parameters of an unusual kind: they train, or one error names the cause and the way out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fleetx import StrategyError, fleet
from training import net, sgd


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


EXCHANGES = [
    {"fp16_allreduce": True},
    {"localsgd": {"allow_single": True}},
    {"adaptive_localsgd": {"allow_single": True}},
    {"dgc": {"allow_single": True}},
    {"use_hierarchical_allreduce": True},
    {"nccl_comm_num": 2},
    {"gradient_merge": {"k_steps": 2}},
    {"pipeline": {"degree": 1}},
]


@pytest.mark.parametrize("declared", EXCHANGES, ids=lambda d: next(iter(d)))
def test_sparse_gradients_are_an_error_at_distribute(declared):
    fleet.init()
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    with pytest.raises(StrategyError, match=r"sparse gradients of '0' is not supported yet: set sparse=False there"):
        fleet.distribute(model, plain_sgd(model), fleet.DistributedStrategy(**declared))


def test_a_lazy_module_must_be_called_first():
    fleet.init()
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))
    with pytest.raises(StrategyError, match=r"0.weight, 0.bias, 1.weight have no shape yet .* call the model once"):
        fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(2, 3))
    fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.body, self.reentrant = net(), reentrant

    def forward(self, x):
        for layer in self.body:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def checkpointed(reentrant):
    fleet.init()
    model = Checkpointed(reentrant)
    strategy = fleet.DistributedStrategy(pipeline={"degree": 2, "micro_batch": 2})
    fleet.distribute(model, sgd(model), strategy)
    with pytest.raises(StrategyError, match=r"calls torch.utils.checkpoint, .* set strategy.recompute"):
        fleet.forward_backward(torch.randn(4, 6), torch.randn(4, 3), loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_recomputes_on_its_own_is_an_error_under_pipeline(ranks, reentrant):
    ranks.run(checkpointed, reentrant)


def grouped():
    fleet.init()
    model = net()
    strategy = fleet.DistributedStrategy(
        pipeline={"degree": 2, "micro_batch": 2},
        use_hierarchical_allreduce=True,
        hierarchical_allreduce_inter_nranks=4,
    )
    with pytest.raises(StrategyError, match=r"inter_nranks = 4 does not divide 2 ranks: use 2 \(only the 2 ranks"):
        fleet.distribute(model, sgd(model), strategy)


def test_groups_larger_than_the_replicas_of_a_pipeline_are_an_error(four):
    four.run(grouped)
