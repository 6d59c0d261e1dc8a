"""The static and the eager form of the same training, bit for bit, on two ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from small_applications import ROWS, batch, make
from static_models import losses, share, started
from torch import Tensor, nn

from fleetx import UsageError, fleet
from fleetx.applications import Application
from fleetx.applications.application import Feed
from fleetx.paddle.api import fleet as paddle_fleet
from fleetx.paddle.api import fluid

SGD = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)  # noqa: E731
ADAM = lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.0)  # noqa: E731
MOMENTUM = (SGD, lambda: fluid.optimizer.Momentum(0.05, 0.9))
ADAMS = (ADAM, lambda: fluid.optimizer.Adam(0.01))

AMP, LOCAL = {"amp": True}, {"k_steps": 2}
LARS = {"lars": {"exclude_from_weight_decay": ["batch_norm", ".b_0"]}}
LAMB = {"lamb": {"exclude_from_weight_decay": ["layer_norm", ".b_0"]}}
RECOMPUTE = {"recompute": {"checkpoints": "its own"}}

# The ten that the documents publish; then those that change how a step runs.
COMBINATIONS = {
    "amp + recompute": ("bert", ADAMS, AMP | RECOMPUTE),
    "dgc + recompute": ("bert", MOMENTUM, {"dgc": {"sparsity": [0.9]}} | RECOMPUTE),
    "lars + recompute": ("resnet", MOMENTUM, LARS | RECOMPUTE),
    "lamb + recompute": ("bert", ADAMS, LAMB | RECOMPUTE),
    "amp + localsgd": ("resnet", MOMENTUM, AMP | {"localsgd": LOCAL}),
    "amp + adaptive_localsgd": ("resnet", MOMENTUM, AMP | {"adaptive_localsgd": {"init_k_steps": 2}}),
    "amp + lars": ("resnet", MOMENTUM, AMP | LARS),
    "amp + lamb": ("bert", ADAMS, AMP | LAMB),
    "amp + recompute + lars": ("resnet", MOMENTUM, AMP | RECOMPUTE | LARS),
    "amp + recompute + lamb": ("bert", ADAMS, AMP | RECOMPUTE | LAMB),
    "nothing": ("transformer", ADAMS, {}),
    "gradient_merge": ("vgg", MOMENTUM, {"gradient_merge": {"k_steps": 2}}),
    "sharding": ("bert", ADAMS, {"sharding": {"sharding_degree": 2}}),
    "pipeline": ("bert", ADAMS, {"pipeline": {"stages": ["bert.encoder.layer.1"], "micro_batch": 2}}),
}


def both(combination):
    """Losses and weights of either form."""
    name, (plain, described), declared = COMBINATIONS[combination]
    options = {"vocab_size": 600} if name == "bert" else {}  # dgc sends small tensors whole
    if "recompute" in declared:
        declared = declared | {"recompute": {"checkpoints": make(name, **options).checkpoints}}
    fleet.init()
    model = make(name, **options)
    model, optimizer = fleet.distribute(model, plain(model.parameters()), fleet.DistributedStrategy(**declared))
    torch.manual_seed(7)
    eager = []
    for step in range(4):
        eager.append(fleet.forward_backward(share(name, step, model), model=model).item())
        optimizer.step()
        optimizer.zero_grad()
    other, executor = started(name, described(), declared, **options)
    torch.manual_seed(7)
    static = losses(other, executor, name)
    return (eager, held(model)), (static, held(other))


def held(model):
    return {k: v.to_local() if hasattr(v, "to_local") else v for k, v in model.state_dict().items() if not v.is_meta}


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_both_forms_give_the_same_losses_and_weights_bit_for_bit(ranks, combination):
    for (eager, weights), (static, others) in ranks.run(both, combination):
        assert static == eager
        assert len(set(eager)) > 1
        assert all(np.isfinite(eager))
        torch.testing.assert_close(others, weights, rtol=0, atol=0)


# --- divided models -------------------------------------------------------------------------------
def test_a_pipeline_returns_only_its_loss_and_the_parameters_of_this_stage(ranks):
    first, second = ranks.run(fetch_from_a_pipeline)
    for errors in (first, second):
        assert "a pipeline returns only its loss: remove 'next_sent_acc'" in errors["next_sent_acc"]
    bias = "encoder_layer_0_ffn_fc_0.b_0"
    assert bias not in first
    assert f"{bias} belongs to another stage" in second[bias]


def fetch_from_a_pipeline():
    """Caught here: an error that leaves a rank restarts the pool."""
    declared = {"pipeline": {"stages": ["bert.encoder.layer.1"], "micro_batch": 2}}
    model, executor = started("bert", fluid.optimizer.Adam(0.01), declared)
    executor.run(model.main_prog, batch("bert"), ["loss"])
    errors = {}
    for wanted in ("next_sent_acc", "encoder_layer_0_ffn_fc_0.b_0"):
        try:
            executor.run(model.main_prog, batch("bert"), [wanted])
        except UsageError as error:
            errors[wanted] = str(error)
    return errors


def test_a_pipeline_is_evaluated_too_and_a_sharded_weight_is_fetched_whole(ranks):
    for before, after, weight in ranks.run(divided_and_evaluated):
        assert before == pytest.approx(after)
        assert weight == (32, 64)


def divided_and_evaluated():
    plain, executor = started("bert", fluid.optimizer.Adam(0.01))
    (before,) = executor.run(plain.main_prog.clone(for_test=True), batch("bert"), ["loss"])
    declared = {"pipeline": {"stages": ["bert.encoder.layer.1"], "micro_batch": 2}}
    model, executor = started("bert", fluid.optimizer.Adam(0.01), declared)
    (after,) = executor.run(model.main_prog.clone(for_test=True), batch("bert"), ["loss"])
    model, executor = started("bert", fluid.optimizer.Adam(0.01), {"sharding": {"sharding_degree": 2}})
    _, weight = executor.run(model.main_prog, batch("bert"), ["loss", "encoder_layer_0_ffn_fc_0.w_0"])
    return before.item(), after.item(), weight.shape


def test_one_worker_that_reads_a_sharded_weight_alone_is_told_and_the_run_goes_on(ranks):
    for said, shape, losses_ in ranks.run(read_alone):
        assert shape == [32, 64]
        assert len(losses_) == 2
        if said:
            assert "fetch it on every worker, with fetch_list=['encoder_layer_0_ffn_fc_0.w_0']" in said


def read_alone():
    model, executor = started("bert", fluid.optimizer.Adam(0.01), {"sharding": {"sharding_degree": 2}})
    found = [executor.run(model.main_prog, batch("bert"), ["loss"])[0].item()]
    weight, said = fluid.global_scope().var("encoder_layer_0_ffn_fc_0.w_0").get_tensor(), ""
    if fleet.worker_index() == 0:
        try:
            np.array(weight)
        except UsageError as error:
            said = str(error)
        assert said
    found.append(executor.run(model.main_prog, batch("bert"), ["loss"])[0].item())
    return said, weight.shape(), found


# --- device_guard ---------------------------------------------------------------------------------
class Guessed(NamedTuple):
    loss: Tensor


class Guarded(Application):
    """A model of the user's own, placed on two stages."""

    outputs = Guessed._fields

    def __init__(self):
        super().__init__({})
        torch.manual_seed(0)
        with fluid.device_guard("gpu:0"):
            self.first = nn.Linear(6, 8)
        with fluid.device_guard("gpu:1"):
            self.second = nn.Linear(8, 3)

    def feeds(self):
        return {"x": Feed((-1, 6), torch.float32), "y": Feed((-1,))}

    def forward(self, x, y):
        return Guessed(nn.functional.cross_entropy(self.second(self.first(x).relu()), y))


def guarded_losses(declared):
    fleet.init()
    model = Guarded()
    optimizer = fluid.optimizer.SGD(0.1)
    paddle_fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy(**declared)).minimize(model.loss)
    executor = fluid.Executor(fluid.CUDAPlace(0))
    executor.run(fluid.default_startup_program())
    g = np.random.default_rng(0)
    feed = {"x": g.normal(size=(ROWS, 6)), "y": g.integers(0, 3, ROWS)}
    return [executor.run(feed=feed, fetch_list=[model.loss])[0].item() for _ in range(4)]


def test_stages_of_a_model_of_ones_own_are_told_by_device_guard(ranks):
    alone = guarded_losses({})
    for found in ranks.run(guarded_losses, {"pipeline": {"micro_batch": 4}}):
        assert found == pytest.approx(alone)
    assert alone[-1] < alone[0]
