"""What cannot act here is named by `explain` or raises; and what contradicts another switch names its own setting."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import DistributedStrategy, StrategyError, fleet
from training import adam, assert_close, batches, net, sgd, train_fleet, weights


def explained(declared, optimizer=sgd):
    fleet.init()
    model = net()
    fleet.distribute(model, optimizer(model), DistributedStrategy(**declared))
    return str(fleet.explain())


ALONE = [
    ({"dgc": {"allow_single": True}}, "dgc: no effect here: there is one replica"),
    ({"localsgd": {"allow_single": True}}, "localsgd: no effect here: there is one replica"),
    ({"adaptive_localsgd": {"allow_single": True}}, "adaptive_localsgd: no effect here: there is one replica"),
    ({"fp16_allreduce": True}, "fp16_allreduce: no effect here: there is one replica"),
    ({"use_hierarchical_allreduce": True}, "use_hierarchical_allreduce: no effect here: there is one replica"),
    ({"nccl_comm_num": 2}, "nccl_comm_num has no effect here: there is one replica"),
    ({"fuse_grad_size_in_MB": 8}, "fuse_grad_size_in_MB has no effect here: there is one replica"),
    ({"sync_batch_norm": True}, "sync_batch_norm: no effect here: the model has no BatchNorm"),
]


@pytest.mark.parametrize(("declared", "text"), ALONE, ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")
def test_explain_names_what_has_no_effect(declared, text):
    assert text in explained(declared)


def test_explain_names_dgc_on_small_tensors_and_parts_in_one_pipeline(ranks):
    assert all("dgc: no effect here: no float32 parameter has 16384" in t for t in ranks.run(explained, {"dgc": True}))
    piped = {"localsgd": True, "pipeline": {"degree": 2, "micro_batch": 2}}
    assert all("localsgd: no effect here: there is one replica" in t for t in ranks.run(explained, piped))
    piped = {"nccl_comm_num": 2, "pipeline": {"degree": 2, "micro_batch": 2}}
    assert all("nccl_comm_num has no effect here: there is one replica" in t for t in ranks.run(explained, piped))


def test_a_micro_batch_size_of_one_is_named_where_it_was_given():
    name = "pipeline_configs['micro_batch_size']"
    assert name in dict(DistributedStrategy(pipeline={"micro_batch_size": 1}).without_meaning())
    assert name not in dict(DistributedStrategy(pipeline={"micro_batch_size": 2}).without_meaning())
    assert name not in dict(DistributedStrategy(pipeline=True).without_meaning())


def test_epsilon_of_lars_without_its_coefficient_is_an_error():
    with pytest.raises(StrategyError, match=r"epsilon has no effect with lars_coeff=None"):
        DistributedStrategy(lars={"lars_coeff": None, "epsilon": 0.1}).plan()


@pytest.mark.parametrize("name", ["matmul_v2", "addmm"])
def test_a_black_list_of_matrix_products_holds_for_linear_layers(name):
    fleet.init()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    strategy = DistributedStrategy(amp={"dtype": "bfloat16", "custom_black_list": [name]})
    model, _ = fleet.distribute(model, sgd(model), strategy)
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model(torch.randn(2, 4))
    assert seen == [torch.float32]


WAYS_OUT = [
    ({"dgc": True, "clip": True}, r"dgc_configs\['clip_norm'\] instead of `clip`"),
    ({"dgc": True, "fp16_allreduce": True}, r"dgc_configs\['value_dtype'\] = 'float16' instead of `fp16_allreduce`"),
]


@pytest.mark.parametrize(("declared", "text"), WAYS_OUT, ids=["clip", "fp16_allreduce"])
def test_a_conflict_names_the_setting_that_does_it_instead(declared, text):
    with pytest.raises(StrategyError, match=text):
        DistributedStrategy(**declared).plan()


@pytest.mark.parametrize(
    ("switch", "make"), [("clip", sgd), ("lars", sgd), ("lamb", adam)], ids=["clip", "lars", "lamb"]
)
def test_a_sum_of_merged_steps_is_clipped_and_scaled_like_any_gradient(switch, make):
    """avg=False with halved losses is avg=True."""
    declared = {switch: {"clip_norm": 0.1} if switch == "clip" else True}

    def halved(model, optimizer, x, y):
        (mse_loss(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    summed = train_fleet(
        batches(), declared | {"gradient_merge": {"k_steps": 2, "avg": False}}, optimizer=make, loop=halved
    )
    fleet.release()
    assert_close(summed, train_fleet(batches(), declared | {"gradient_merge": {"k_steps": 2}}, optimizer=make))


def test_a_budget_with_a_cumulative_batch_norm():
    def trained(declared):
        fleet.init()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32, momentum=None), nn.Tanh(), nn.Linear(32, 3))
        model, optimizer = fleet.distribute(model, sgd(model), DistributedStrategy(**declared))
        for x, y in batches(3):
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = weights(model)
        fleet.release()
        return found

    assert_close(trained({"recompute": {"memory_budget": "min"}}), trained({}))
