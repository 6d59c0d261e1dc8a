"""Parameters that are frozen or unfrozen while the training runs: as in plain PyTorch, on every number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from fleetx import UsageError, fleet
from fleetx.comm.session import current
from training import adamw, assert_close, batches, big, net, sgd, share, zero_last

SHARDED = {"sharding_segment_strategy": "segment_anchors", "segment_anchors": ["0", "2"]}
SETTINGS = {
    "plain": {},
    "find_unused": {"find_unused_parameters": True},
    "clip": {"clip": {"clip_norm": 0.1}},
    "groups": {"nccl_comm_num": 2},
    "sharding 1": {"sharding": {"stage": 1, **SHARDED}},
    "sharding 3": {"sharding": {"stage": 3, **SHARDED}},
    "recompute": {"recompute": {"checkpoints": ["0", "2"]}},
}


def head_only():
    model = net()
    model[:4].requires_grad_(False)
    return model


def all_frozen():
    return net().requires_grad_(False)


def gradual(model, i):
    """From the head to the first layer, and back to the head."""
    model[2].requires_grad_(2 <= i < 6)
    model[0].requires_grad_(4 <= i < 6)
    model[4].requires_grad_(True)


def alternating(model, i):
    """As when two halves of a model are trained in turn."""
    model[0].requires_grad_(i % 4 < 2)
    model[2].requires_grad_(i % 4 > 1)


def plain(make, plan, k=1, clip=None, optimizer=adamw):
    model = make()
    o = optimizer(model)
    for i, (x, y) in enumerate(big(batches(), k)):
        plan(model, i * k)
        mse_loss(model(x), y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        o.step()
        o.zero_grad()
    return {n: t.detach() for n, t in model.state_dict().items()}


def trained(make, plan, settings, optimizer=adamw):
    fleet.init()
    model = make()
    model, o = fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**settings))
    for i, (x, y) in enumerate(share(batches(), fleet.worker_index(), fleet.worker_num())):
        plan(model, i)
        zero_last(model, o, x, y)
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for n, t in model.state_dict().items()}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_gradual_unfreezing_equals_plain_pytorch(ranks, settings):
    want = plain(head_only, gradual, clip=settings.get("clip", {}).get("clip_norm"))
    for found in ranks.run(trained, head_only, gradual, settings):
        assert_close(found, want)


@pytest.mark.parametrize("plan", [gradual, alternating])
@pytest.mark.parametrize("make", [net, all_frozen])
def test_any_part_may_be_trained_in_any_round(ranks, make, plan):
    merge = {"gradient_merge": {"k_steps": 2}}
    for found in ranks.run(trained, make, plan, {}):
        assert_close(found, plain(make, plan))
    for found in ranks.run(trained, make, plan, merge):
        assert_close(found, plain(make, plan, k=2))


def ends_only():
    model = net()
    model[2].requires_grad_(False)
    return model


def middle(model, i):
    model[2].requires_grad_(2 <= i < 6)


def staged():
    fleet.init()
    model = ends_only()
    declared = {"pipeline": {"micro_batch": 2, "degree": 2, "stages": ["2"]}}
    model, o = fleet.distribute(model, adamw(model), fleet.DistributedStrategy(**declared))
    for i, (x, y) in enumerate(batches()):
        middle(model, i)
        fleet.forward_backward(x, y, loss_fn=mse_loss)
        o.step()
        o.zero_grad()
    return {n: t.detach() for n, t in model.state_dict().items()}


def test_stages_of_a_pipeline(ranks):
    found = {n: t for part in ranks.run(staged) for n, t in part.items()}
    assert_close(found, plain(ends_only, middle))


def slow(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def wide():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 3))
    model[0].requires_grad_(False)
    return model


def wide_plan(model, i):
    model[0].requires_grad_(i > 2)


def test_dgc_that_sends_everything(ranks):
    settings = {"dgc": {"sparsity": [0.0], "rampup_begin_step": 0, "rampup_step": 1}}
    for found in ranks.run(trained, wide, wide_plan, settings, slow):
        assert_close(found, plain(wide, wide_plan, optimizer=slow))


def apart():
    """Rank 0 unfreezes one layer; rank 1 another one."""
    fleet.init()
    model = head_only()
    model, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy())
    x, y = batches(1)[0]
    zero_last(model, o, x, y)
    if fleet.worker_index() == 0:
        model[0].requires_grad_(True)
    else:
        model[2].requires_grad_(True)
    try:
        zero_last(model, o, x, y)
    except UsageError as error:
        return str(error)
    return ""


def test_ranks_that_train_different_parameters_are_named(ranks):
    for said in ranks.run(apart):
        assert "'0.weight' is trained only on rank 0: set requires_grad of the same parameters on every rank" in said


def reducers(plan):
    """How many were made in eight steps, and how many remain."""
    import gc

    from torch.nn.parallel import DistributedDataParallel

    fleet.init()
    model = net()
    model, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy())
    for i, (x, y) in enumerate(share(batches(), fleet.worker_index(), 2)):
        plan(model, i)
        zero_last(model, o, x, y)
    gc.collect()
    return sum(isinstance(each, DistributedDataParallel) for each in gc.get_objects())


def test_old_buckets_do_not_stay(ranks):
    assert ranks.run(reducers, alternating) == [1, 1]


def resumed_frozen(folder):
    """Weights after a run in which a layer was frozen, and after the same run resumed in a script that freezes it."""
    fleet.init()

    def made():
        current().entries.clear()
        model = net()
        return fleet.distribute(model, adamw(model), fleet.DistributedStrategy())

    def train(model, o, data):
        for x, y in share(data, fleet.worker_index(), fleet.worker_num()):
            zero_last(model, o, x, y)
        return {n: t.detach().clone() for n, t in model.state_dict().items()}

    data = batches(12, size=8)
    model, o = made()
    train(model, o, data[:2])
    model[2].requires_grad_(False)
    train(model, o, data[2:4])
    fleet.save(folder)
    want = train(model, o, data[4:])
    model, o = made()
    model[2].requires_grad_(False)
    fleet.load(folder)
    return want, train(model, o, data[4:])


def test_a_run_that_freezes_a_layer_before_the_load_resumes_bit_for_bit(four, tmp_path):
    for want, found in four.run(resumed_frozen, tmp_path / "c"):
        torch.testing.assert_close(found, want, rtol=0, atol=0)
