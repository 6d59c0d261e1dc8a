"""What torch itself offers around a model: wrappers, parametrizations, hooks, copies, compilation, other optimizers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from fleetx import FleetxError, UsageError, fleet
from training import batches, net, sgd, share, zero_last

CPU = torch.device("cpu")
SAME = {"rtol": 1e-12, "atol": 1e-12}
STRATEGIES = {
    "nothing": {},
    "merge": {"gradient_merge": {"k_steps": 2}},
    "clip": {"clip": {"clip_norm": 0.1}},
    "sharding": {"sharding": True},
    "sharding stage 3": {"sharding": {"stage": 3}},
    "recompute": {"recompute": {"checkpoints": ["0", "2"]}},
}
every_strategy = pytest.mark.parametrize("declared", STRATEGIES.values(), ids=list(STRATEGIES))


def double():
    return net().double()


def data():
    return [(x.double(), y.double()) for x, y in batches(6)]


def whole(model):
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in model.state_dict().items()}


def distributed(declared, make=double, optimizer=sgd):
    fleet.init()
    model = make()
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))


def train(model, optimizer):
    for x, y in share(data(), fleet.worker_index(), fleet.worker_num()):
        zero_last(model, optimizer, x, y)


def trained(declared, make, optimizer, after):
    model, o = distributed(declared, make, optimizer)
    train(after(model), o)
    return whole(model)


def plain(declared, make, optimizer):
    """One process on the whole batch."""
    k, clip = (declared.get(s, {}).get(v) for s, v in (("gradient_merge", "k_steps"), ("clip", "clip_norm")))
    model, steps = make(), data()
    o = optimizer(model)
    for first in range(0, len(steps), k or 1):
        x, y = (torch.cat(tensors) for tensors in zip(*steps[first : first + (k or 1)], strict=True))
        mse_loss(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        o.step()
        o.zero_grad()
    return whole(model)


def as_it_is(model):
    return model


def equals_one_process(ranks, declared, make=double, optimizer=sgd, after=as_it_is):
    want = plain(declared, make, optimizer)
    for found in ranks.run(trained, declared, make, optimizer, after):
        found = {name.replace("_orig_mod.", ""): t for name, t in found.items()}
        torch.testing.assert_close(found, {n.replace("_orig_mod.", ""): t for n, t in want.items()}, **SAME)


def error_of(job, *args):
    try:
        job(*args)
    except FleetxError as error:
        return str(error)
    return "no error"


def is_an_error(ranks, text, job, *args):
    for said in ranks.run(error_of, job, *args):
        assert text in said


# --- wrappers ------------------------------------------------------------------------------------------
def ddp(model):
    return DistributedDataParallel(model)


def ddp_around_more(model):
    """The distributed model is only a part of what is wrapped."""
    return DistributedDataParallel(nn.Sequential(model, nn.Tanh()))


def fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=CPU)


def replicated(model):
    from torch.distributed._composable.replicate import replicate

    return replicate(model)


def fsdp2(model):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def wrapped_later(declared, wrap):
    model, o = distributed(declared)
    train(wrap(model), o)


TWO = [{}, {"gradient_merge": {"k_steps": 2}}, {"sharding": True}]


@pytest.mark.parametrize("declared", TWO, ids=["nothing", "merge", "sharding"])
@pytest.mark.parametrize("wrap", [ddp, ddp_around_more])
def test_ddp_around_a_distributed_model_is_an_error(ranks, declared, wrap):
    text = "DistributedDataParallel around a distributed model would manage its gradients a second time: remove the"
    is_an_error(ranks, text, wrapped_later, declared, wrap)


@pytest.mark.parametrize("declared", TWO, ids=["nothing", "merge", "sharding"])
def test_fsdp1_around_a_distributed_model_is_an_error(ranks, declared):
    is_an_error(ranks, "FullyShardedDataParallel around a distributed model", wrapped_later, declared, fsdp1)


@pytest.mark.parametrize("declared", TWO[:2], ids=["nothing", "merge"])
def test_replicate_and_fully_shard_on_a_distributed_model_are_errors(ranks, declared):
    is_an_error(ranks, "around a distributed model would manage its", wrapped_later, declared, replicated)
    is_an_error(ranks, "parameter '0.weight' was replaced by another one", wrapped_later, declared, fsdp2)


def wrapped_before(declared, wrap, within):
    fleet.init()
    model = wrap(double())
    model = nn.Sequential(model, nn.Tanh()) if within else model
    fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))


NAMES = {
    ddp: "DistributedDataParallel, which fleetx replaces: pass the plain model",
    fsdp1: "FullyShardedDataParallel, which fleetx replaces: pass the plain model",
    replicated: "replicate(), which fleetx replaces: pass the plain model",
    fsdp2: "is a DTensor, as fully_shard makes them: pass the plain model",
}


@pytest.mark.parametrize("declared", TWO, ids=["nothing", "merge", "sharding"])
@pytest.mark.parametrize("wrap", NAMES, ids=lambda f: f.__name__)
def test_a_model_that_is_wrapped_already_is_an_error(ranks, declared, wrap):
    for within in (False, True):
        is_an_error(ranks, NAMES[wrap], wrapped_before, declared, wrap, within)


def inner_of_ddp():
    """The inner model is distributed, and the wrapper is called."""
    fleet.init()
    model = double()
    outer = DistributedDataParallel(model)
    _, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy())
    train(outer, o)


def test_the_inner_model_of_a_wrapper_is_found_in_the_first_forward(ranks):
    is_an_error(ranks, "around a distributed model would manage its gradients a second time", inner_of_ddp)


def wraps_after_release():
    model, _ = distributed({})
    fleet.release(model)
    DistributedDataParallel(model)
    return DistributedDataParallel.__init__.__module__


def test_after_release_torch_has_its_own_wrappers_again(ranks):
    assert ranks.run(wraps_after_release) == ["torch.nn.parallel.distributed"] * 2


# --- models --------------------------------------------------------------------------------------------
def weight_norm():
    model = double()
    parametrizations.weight_norm(model[0])
    parametrizations.orthogonal(model[2])
    return model


def old_weight_norm():
    model = double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        nn.utils.weight_norm(model[0])
    return model


@every_strategy
@pytest.mark.parametrize("make", [weight_norm, old_weight_norm])
def test_parametrized_models(ranks, declared, make):
    equals_one_process(ranks, declared, make)


class Lora(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        g = torch.Generator().manual_seed(2)
        self.a = nn.Parameter(torch.randn(2, inner.in_features, generator=g, dtype=torch.float64) / 10)
        self.b = nn.Parameter(torch.zeros(inner.out_features, 2, dtype=torch.float64))

    def forward(self, x):
        return self.inner(x) + x @ self.a.T @ self.b.T


def lora():
    model = double()
    model[0], model[2] = Lora(model[0]), Lora(model[2])
    model[4].requires_grad_(False)
    return model


def of_the_trainable(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@every_strategy
def test_lora(ranks, declared):
    equals_one_process(ranks, declared, lora, of_the_trainable)


def lora_too_late(declared):
    model, o = distributed(declared)
    model[0] = Lora(model[0])
    train(model, o)


@every_strategy
def test_lora_that_is_added_after_distribute_is_an_error(ranks, declared):
    is_an_error(ranks, "parameter '0.a' was added after fleet.distribute", lora_too_late, declared)


def parametrized_too_late(declared):
    model, o = distributed(declared)
    parametrizations.weight_norm(model[2])
    train(model, o)


@every_strategy
def test_a_parametrization_after_distribute_is_an_error(ranks, declared):
    is_an_error(ranks, "parameter '2.weight' was replaced by another one", parametrized_too_late, declared)


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_net():
    return compiled(double())


def compiled_in_place():
    model = double()
    model.compile(backend="eager")
    return model


def with_a_compiled_layer():
    model = double()
    model[0] = torch.compile(model[0], backend="eager")
    return model


@pytest.mark.parametrize("make", [compiled_net, compiled_in_place, with_a_compiled_layer])
@pytest.mark.parametrize("declared", TWO, ids=["nothing", "merge", "sharding"])
def test_compiled_models(ranks, declared, make):
    equals_one_process(ranks, declared, make)


@pytest.mark.parametrize("declared", TWO, ids=["nothing", "merge", "sharding"])
def test_models_that_are_compiled_later(ranks, declared):
    equals_one_process(ranks, declared, after=compiled)


def moved(declared):
    """As a Trainer does in every run."""
    model, o = distributed(declared)
    train(model.to(CPU).to("cpu:0").to(torch.float64).double().cpu(), o)
    return whole(model)


@every_strategy
def test_a_model_may_be_moved_to_where_it_is(ranks, declared):
    want = plain(declared, double, sgd)
    for found in ranks.run(moved, declared):
        torch.testing.assert_close(found, want, **SAME)


def converted(declared):
    distributed(declared)[0].float()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_sharded_model_is_not_converted(ranks, stage):
    is_an_error(ranks, "a sharded model cannot be moved or converted", converted, {"sharding": {"stage": stage}})


# --- hooks ---------------------------------------------------------------------------------------------
def doubled(module, grad_input, grad_output):
    return (grad_input[0] * 2,)


def larger(module, args, out):
    return out * 1.5


def halved(grad):
    return grad * 0.5


def smaller(p):
    p.grad.mul_(0.3)


def on_modules(model):
    model[2].register_full_backward_hook(doubled)
    model[4].register_forward_hook(larger)
    return model


def on_parameters(model):
    model[0].weight.register_hook(halved)
    return model


def hooked():
    return on_modules(double())


def hooked_parameters():
    return on_parameters(on_modules(double()))


@every_strategy
def test_hooks_on_modules(ranks, declared):
    equals_one_process(ranks, declared, hooked)


@pytest.mark.parametrize(
    "declared", [d for d in STRATEGIES.values() if "sharding" not in d], ids=lambda d: next(iter(d), "nothing")
)
def test_hooks_on_parameters(ranks, declared):
    equals_one_process(ranks, declared, hooked_parameters)


def hooked_later(declared):
    model, _ = distributed(declared)
    on_parameters(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_hooks_on_parameters_are_an_error_under_sharding(ranks, stage):
    declared = {"sharding": {"stage": stage}}
    is_an_error(ranks, "on parameter '0.weight', because", distributed, declared, hooked_parameters)
    is_an_error(ranks, "use register_post_accumulate_grad_hook", hooked_later, declared)


def with_a_late_hook():
    model = double()
    model[4].bias.register_post_accumulate_grad_hook(smaller)
    return model


def late_hook(model):
    model[4].bias.register_post_accumulate_grad_hook(smaller)
    return model


@pytest.mark.parametrize("declared", [{}, {"sharding": True}], ids=["nothing", "sharding"])
def test_hooks_after_accumulation(ranks, declared):
    want = plain({}, with_a_late_hook, sgd)
    for found in ranks.run(trained, declared, double, sgd, late_hook):
        torch.testing.assert_close(found, want, **SAME)


def counted(declared):
    fleet.init()
    model, calls = double(), []
    o = sgd(model)
    o.register_step_pre_hook(lambda *_: calls.append("before"))
    model, o = fleet.distribute(model, o, fleet.DistributedStrategy(**declared))
    o.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, o)
    return calls


@every_strategy
def test_hooks_on_steps_are_called_once_per_step(ranks, declared):
    assert ranks.run(counted, declared) == [["before", "after"] * 6] * 2


# --- optimizers and several models ---------------------------------------------------------------------
def zero_redundancy(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, when it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("declared", [{}, {"gradient_merge": {"k_steps": 2}}, {"clip": {"clip_norm": 0.1}}], ids=str)
def test_zero_redundancy_optimizer(ranks, declared):
    want = plain(declared, double, sgd)
    for found in ranks.run(trained, declared, double, zero_redundancy, as_it_is):
        torch.testing.assert_close(found, want, **SAME)


@pytest.mark.parametrize("declared", [{"sharding": True}, {"localsgd": True}], ids=["sharding", "localsgd"])
def test_zero_redundancy_optimizer_is_an_error_where_ranks_update_their_own(ranks, declared):
    is_an_error(ranks, "pass the optimizer that it wraps", distributed, declared, double, zero_redundancy)


def second():
    torch.manual_seed(3)
    return nn.Linear(3, 3).double()


def two_models(declared):
    """Each with its optimizer; one backward goes through both."""
    first, o1 = distributed(declared)
    other, o2 = distributed({k: v for k, v in declared.items() if k != "recompute"}, second)
    for x, y in share(data(), fleet.worker_index(), fleet.worker_num()):
        zero_both(other, first, (o1, o2), x, y)
    return whole(first), whole(other)


def zero_both(other, first, optimizers, x, y):
    mse_loss(other(first(x)), y).backward()
    for o in optimizers:
        o.step()
        o.zero_grad()


TOGETHER = {name: STRATEGIES[name] for name in ("nothing", "sharding", "sharding stage 3", "recompute")}


@pytest.mark.parametrize("declared", TOGETHER.values(), ids=list(TOGETHER))
def test_two_models_and_two_optimizers(ranks, declared):
    first, other = double(), second()
    both = sgd(first), sgd(other)
    for x, y in data():
        zero_both(other, first, both, x, y)
    for found in ranks.run(two_models, declared):
        torch.testing.assert_close(found, (whole(first), whole(other)), **SAME)


def shared():
    fleet.init()
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    fleet.distribute(first, torch.optim.SGD(first.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"'weight' is also in a model that is distributed already.* one nn.Module"):
        fleet.distribute(second, torch.optim.SGD([second.bias], lr=0.1))
    fleet.release(first)
    fleet.distribute(second, torch.optim.SGD(second.parameters(), lr=0.1))


def test_two_models_that_share_a_parameter_are_named(ranks):
    ranks.run(shared)
