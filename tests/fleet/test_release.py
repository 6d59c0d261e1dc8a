"""`fleet.release` gives the plain model and optimizer back, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import fleet
from fleetx.comm.session import current
from fleetx.errors import UsageError
from training import adam, sgd

TWO = {
    "nothing": {},
    "amp": {"amp": {"dtype": "bfloat16", "custom_black_list": ["2"]}},
    "fp16": {"amp": {"init_loss_scaling": 2.0}},
    "recompute": {"recompute": {"checkpoints": ["0", "2"]}},
    "gradient_merge": {"gradient_merge": {"k_steps": 2}},
    "clip": {"clip": True},
    "lars": {"lars": True},
    "lamb": {"lamb": True},
    "dgc": {"dgc": {"rampup_step": 1, "sparsity": [0.5]}},
    "localsgd": {"localsgd": {"k_steps": 2}},
    "overlap": {"localsgd": {"k_steps": 2, "overlap": True}},
    "adaptive_localsgd": {"adaptive_localsgd": {"init_k_steps": 2}},
    "fp16_allreduce": {"fp16_allreduce": True},
    "sync_batch_norm": {"sync_batch_norm": True},
    "sharding": {"sharding": {"sharding_degree": 2}},
    "sharding stage 3": {"sharding": {"sharding_degree": 2, "stage": 3}},
    "pipeline": {"pipeline": {"stages": ["2"], "accumulate_steps": 2}},
    "communicators": {"nccl_comm_num": 2},
}
HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]


def make(norm=nn.BatchNorm1d):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(160, 120), norm(120), nn.Linear(120, 10))


def look(model, optimizer):
    """Everything about the objects that a strategy might have changed, but for their values."""
    modules = [(type(m), sorted(map(str, vars(m))), [len(vars(m)[h]) for h in HOOKS]) for m in model.modules()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    hooks = [len(getattr(optimizer, n)) for n in sorted(vars(optimizer)) if "hooks" in n]
    names = [(n, type(p), p.shape, p.device.type) for n, p in model.named_parameters()]
    return modules, type(optimizer), sorted(vars(optimizer)), groups, hooks, names


def held():
    gc.collect()
    threads = sorted(t.name for t in threading.enumerate() if "fleetx" in t.name)
    return threads, len(dist.distributed_c10d._world.pg_map)


def job(settings):
    fleet.init()
    model = make()
    optimizer = (adam if "lamb" in settings else sgd)(model)
    before, groups = look(model, optimizer), held()
    armed = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**copy.deepcopy(settings)))
    engine = weakref.ref(fleet._engine(None))
    torch.manual_seed(fleet.worker_index() if "pipeline" not in settings else 0)
    for _ in range(4):
        x, y = torch.randn(8, 160), torch.randn(8, 10)
        fleet.forward_backward(x, y, loss_fn=mse_loss)
        armed[1].step()
        armed[1].zero_grad()
    plain = fleet.release()
    assert plain[0] is model
    assert plain[1] is optimizer
    for now, then in zip(look(*plain), before, strict=True):
        assert now == then, (now, then)
    del armed
    gc.collect()
    assert engine() is None
    assert held() == groups
    assert not current().entries
    mse_loss(model(torch.randn(4, 160)), torch.randn(4, 10)).backward()
    optimizer.step()


@pytest.mark.parametrize("settings", TWO.values(), ids=list(TWO))
def test_nothing_stays_behind(ranks, settings):
    ranks.run(job, settings)


def trained(settings):
    """(released weights and optimizer state) of two ranks that train on the same batches."""
    fleet.init()
    model = make(nn.LayerNorm).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if settings is not None:
        fleet.distribute(model, optimizer, fleet.DistributedStrategy(**settings))
    torch.manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(8, 160).double(), torch.randn(8, 10).double()
        if settings is not None:
            fleet.forward_backward(x, y, loss_fn=mse_loss)
        else:
            mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if settings is not None:
        fleet.release()
    names = {p: n for n, p in model.named_parameters()}
    state = {names[p]: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    return {n: p.detach().clone() for n, p in model.named_parameters()}, state


@pytest.mark.parametrize("kind", ["sharding", "pipeline"])
def test_every_rank_gets_the_whole_model_and_optimizer_state(ranks, kind):
    settings = {
        "sharding": {"sharding": {"sharding_degree": 2}},
        "pipeline": {"pipeline": {"stages": ["2"], "accumulate_steps": 2}},
    }[kind]
    expected, expected_state = trained(None)
    for weights, state in ranks.run(trained, settings):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)
            for key in expected_state[name]:
                torch.testing.assert_close(state[name][key], expected_state[name][key], rtol=0, atol=1e-12)


def test_an_open_window_must_be_closed_first():
    fleet.init()
    model = make()
    optimizer = sgd(model)
    fleet.distribute(model, optimizer, fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))
    mse_loss(model(torch.randn(4, 160)), torch.randn(4, 10)).backward()
    optimizer.step()
    with pytest.raises(UsageError, match=r"call optimizer.step\(\) and fleet.flush\(\) before"):
        fleet.release()
    fleet.flush()
    fleet.release()


def test_a_released_model_can_be_distributed_again():
    fleet.init()
    model = make()
    optimizer = sgd(model)
    for settings in ({"lars": True}, {"amp": {"dtype": "bfloat16"}}, {}):
        fleet.distribute(model, optimizer, fleet.DistributedStrategy(**settings))
        mse_loss(model(torch.randn(4, 160)), torch.randn(4, 10)).backward()
        optimizer.step()
        optimizer.zero_grad()
        fleet.release(model)


def test_what_the_user_added_since_stays():
    fleet.init()
    model = make()
    optimizer = sgd(model)
    fleet.distribute(model, optimizer, fleet.DistributedStrategy(lars=True))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    optimizer.param_groups[0]["lr"] = 0.123
    fleet.release()
    model(torch.randn(4, 160))
    assert calls == [1]
    assert optimizer.param_groups[0]["lr"] == 0.123
