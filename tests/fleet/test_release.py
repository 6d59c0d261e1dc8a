"""`fleet.release` gives the plain model and optimizer back, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import os
import re
import sys
import threading
import types
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import fleet
from fleetx.comm.session import current
from fleetx.errors import UsageError
from fleetx.strategy.part import every
from rank_pool import Ranks
from training import adam, adamw, sgd

TWO = {
    "nothing": {},
    "amp": {"amp": {"dtype": "bfloat16", "custom_black_list": ["2"]}},
    "fp16": {"amp": {"init_loss_scaling": 2.0}},
    "recompute": {"recompute": {"checkpoints": ["0", "2"]}},
    "gradient_merge": {"gradient_merge": {"k_steps": 2}},
    "clip": {"clip": True},
    "ema": {"ema": True},
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
    "muon": {"muon": True},
    "quantized_allreduce": {"quantized_allreduce": {"bits": 8}},
    "noise_scale": {"noise_scale": {"every": 1}},
    "one island": {"localsgd": {"k_steps": 2, "group_size": 2}},
}
OF_FOUR = {
    "hierarchical": {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2},
    "islands": {"localsgd": {"k_steps": 2, "group_size": 2}},
    "replicas of shards": {"sharding": {"sharding_degree": 2, "hybrid_dp": True}, "quantized_allreduce": True},
}
ELSEWHERE = {"auto", "batch"}  # they choose the others; what they choose is released as above
OF_TORCH = re.compile(
    r"torch(\.(nn|autograd|func|optim|distributed|random|amp|utils\.(checkpoint|data|hooks))(\..*)?)?$"
)
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


def of_torch():
    """Every function of torch and its classes that a loop may call: the engine replaces some while a model trains."""
    found = {}
    for where, module in list(sys.modules.items()):
        if not OF_TORCH.match(where) or not isinstance(module, types.ModuleType):
            continue
        classes = {f"{where}.{name}": each for name, each in list(vars(module).items()) if issubclass(type(each), type)}
        for owner, held_by in ({where: module} | classes).items():
            functions = {name: each for name, each in list(vars(held_by).items()) if callable(each)}
            found |= {f"{owner}.{name}": each for name, each in functions.items() if not issubclass(type(each), type)}
    return found


def held():
    gc.collect()
    threads = sorted(t.name for t in threading.enumerate() if "fleetx" in t.name)
    return threads, len(dist.distributed_c10d._world.pg_map)


def job(settings):
    fleet.init()
    model = make()
    adams = {"lamb": adam, "muon": adamw}
    optimizer = next((adams[switch] for switch in settings if switch in adams), sgd)(model)
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
    assert held() == groups, (held(), groups)
    assert not current().entries
    mse_loss(model(torch.randn(4, 160)), torch.randn(4, 10)).backward()
    optimizer.step()


def only_made(settings):
    fleet.init()
    model = make()
    fleet.release(fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**settings))[0])


@pytest.mark.parametrize("settings", TWO.values(), ids=list(TWO))
def test_nothing_stays_behind(ranks, settings):
    ranks.run(job, settings)


@pytest.mark.parametrize("settings", OF_FOUR.values(), ids=list(OF_FOUR))
def test_nothing_stays_behind_on_four_ranks(four, settings):
    if "sharding" in settings:  # torch caches results per mesh, so that its two process groups stay for the next model
        four.run(only_made, settings)
    four.run(job, settings)


def test_every_strategy_is_released():
    released = {switch for settings in (*TWO.values(), *OF_FOUR.values()) for switch in settings}
    always = {switch for switch, part in every().items() if part.always}
    assert every().keys() - released - always <= ELSEWHERE


def replaced(several):
    """Functions of torch that are not what they were before the first model."""
    sgd(make())  # torch itself replaces the step of a class when it makes the first one
    functions, found = of_torch(), {}
    for settings in several:
        job(settings)
        now = of_torch()
        found[str(settings)] = [name for name, function in functions.items() if now.get(name, function) is not function]
    return {settings: names for settings, names in found.items() if names}


def test_the_functions_of_torch_are_its_own_again():
    pool = Ranks(2)  # new processes, in which no other model is still alive
    several = ["nothing", "fp16", "recompute", "gradient_merge", "clip", "dgc", "localsgd", "sharding", "pipeline"]
    try:
        assert pool.run(replaced, [TWO[name] for name in several]) == [{}, {}]
    finally:
        pool.stop()


HIERARCHICAL = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2}


def forgotten(settings):
    """Threads and open files after models that were trained and deleted, one after the other."""
    fleet.init()
    found = []
    for _ in range(4):
        model, optimizer = fleet.distribute(model := make(), sgd(model), fleet.DistributedStrategy(**settings))
        mse_loss(model(torch.randn(8, 160)), torch.randn(8, 10)).backward()
        optimizer.step()
        del model, optimizer
        gc.collect()
        found.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    return found


@pytest.mark.parametrize(
    "settings",
    [HIERARCHICAL, {"nccl_comm_num": 2}, {"localsgd": {"overlap": True}}],
    ids=["hierarchical", "communicators", "overlap"],
)
def test_models_that_are_deleted_leave_no_threads_and_files_behind(four, settings):
    for first, *others in four.run(forgotten, settings):
        assert others[-1] <= others[0], (first, others)


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
    with pytest.raises(
        UsageError, match=r"1 step of a merge window has not been applied: call fleet.flush\(\) before fleet.release"
    ):
        fleet.release()
    fleet.flush()
    fleet.release()


@pytest.mark.parametrize("to_none", [True, False])
def test_a_backward_that_was_thrown_away_is_no_open_window(to_none):
    fleet.init()
    model = make()
    optimizer = sgd(model)
    fleet.distribute(model, optimizer, fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))
    mse_loss(model(torch.randn(4, 160)), torch.randn(4, 10)).backward()
    optimizer.zero_grad(set_to_none=to_none)
    fleet.release()


@pytest.mark.parametrize("settings", [{"amp": {"init_loss_scaling": 64.0}}, {"gradient_merge": {"k_steps": 2}},
                                      {"amp": {"dtype": "bfloat16"}, "recompute": {"checkpoints": ["0", "2"]}}],
                         ids=["fp16", "gradient_merge", "recompute"])  # fmt: skip
def test_a_loss_from_before_is_not_differentiated_after(settings):
    fleet.init()
    model = make()
    optimizer = sgd(model)
    fleet.distribute(model, optimizer, fleet.DistributedStrategy(**settings))
    loss = mse_loss(model(torch.randn(4, 160)), torch.randn(4, 10))
    fleet.release()
    with pytest.raises(UsageError, match=r"this loss was computed before fleet.release: call backward\(\) before"):
        loss.backward()
    mse_loss(model(torch.randn(4, 160)), torch.randn(4, 10)).backward()


def with_scheduler(settings, when):
    """The weights after one step of plain training that follows a release."""
    fleet.init()
    model = make()
    optimizer = (adam if "lamb" in settings else sgd)(model)
    schedulers = []
    if when == "before":
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    fleet.distribute(model, optimizer, fleet.DistributedStrategy(**settings))
    if when == "after":
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    mse_loss(model(torch.ones(4, 160)), torch.ones(4, 10)).backward()
    optimizer.step()
    optimizer.zero_grad()
    fleet.release()
    optimizer.state.clear()
    model.load_state_dict(make().state_dict())
    torch.manual_seed(1)
    mse_loss(model(torch.randn(4, 160)), torch.randn(4, 10)).backward()
    optimizer.step()
    for scheduler in schedulers:
        scheduler.step()  # warns if it has not seen the step
    return [p.detach().clone() for p in model.parameters()]


ADOPTED = {"lars": {"lars": True}, "lamb": {"lamb": True}, "dgc": {"dgc": {"allow_single": True}}}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("settings", ADOPTED.values(), ids=list(ADOPTED))
def test_a_scheduler_created_before_or_after_distribute(settings, when):
    for got, expected in zip(with_scheduler(settings, when), with_scheduler(settings, "never"), strict=True):
        assert torch.equal(got, expected)


def test_a_group_added_under_the_strategy_is_plain_again():
    fleet.init()
    model = make()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    plain = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    fleet.distribute(model, optimizer, fleet.DistributedStrategy(lars=True))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    fleet.release()
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == [plain, plain]


def test_a_forward_patched_since_stays():
    fleet.init()
    model = make()
    fleet.distribute(model, sgd(model), fleet.DistributedStrategy(recompute={"checkpoints": ["0", "2"]}))
    wrapped, calls = model[0].forward, []
    model[0].forward = lambda x: (calls.append(1), wrapped(x))[1]
    fleet.release()
    x = torch.randn(4, 160)
    assert torch.equal(model(x), make()(x))
    assert calls == [1]
    assert "forward" not in vars(model[2])


def test_a_module_that_was_replaced_since_is_plain_too():
    fleet.init()
    model = make()
    fleet.distribute(model, sgd(model), fleet.DistributedStrategy(recompute={"checkpoints": ["0", "2"]}))
    head = model[2]
    assert "forward" in vars(head)
    model[2] = nn.Linear(120, 10)
    fleet.release()
    assert "forward" not in vars(head)


def failing(settings):
    fleet.init()
    model = make(nn.LayerNorm)
    optimizer = sgd(model)
    before = look(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetx.engine.engine.forget_compiled", _fail)
        with pytest.raises(RuntimeError, match="no memory"):
            fleet.distribute(model, optimizer, fleet.DistributedStrategy(**settings))
    for now, then in zip(look(model, optimizer), before, strict=True):
        assert now == then, (now, then)
    assert {p for g in optimizer.param_groups for p in g["params"]} == set(model.parameters())
    fleet.distribute(model, optimizer, fleet.DistributedStrategy())


def _fail():
    raise RuntimeError("no memory")


@pytest.mark.parametrize("name", ["sharding", "recompute", "lars"])
def test_a_failing_distribute_changes_nothing(ranks, name):
    ranks.run(failing, TWO[name])


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
