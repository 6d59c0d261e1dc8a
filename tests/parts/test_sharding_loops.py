"""Loops that people write around a sharded model equal the same loop on one rank, in float64."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from fleetx import UsageError, fleet

ANCHORS = {"sharding_segment_strategy": "segment_anchors", "segment_anchors": ["0", "2"]}
ALL = {"sharding_segment_strategy": "segment_anchors", "segment_anchors": ["*"]}  # nothing is left for the root
SETTINGS = {
    "stage 1": {},
    "segments": {"stage": 2, **ANCHORS},
    "empty root": {"stage": 2, **ALL},
    "stage 3": {"stage": 3},
}
each_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(steps=4, size=8):
    g = torch.Generator().manual_seed(1)
    rows = [torch.randn(size, 9, generator=g, dtype=torch.float64) for _ in range(steps)]
    return [(r[:, :6], r[:, 6:]) for r in rows]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def whole(model):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in model.state_dict().items()}


def armed(setting, *, make=net, optimizer=sgd, **more):
    fleet.init()
    model = make()
    declared = {"sharding": {"sharding_degree": fleet.worker_num(), **setting}, **more}
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))


def mine(batch):
    return [t.chunk(fleet.worker_num())[fleet.worker_index()] for t in batch]


def sharded(loop, setting, **more):
    model, o = armed(setting, **more)
    seen = [loop(model, o, *mine(batch)) for batch in batches()]
    return whole(model), seen


def plain(loop):
    model = net()
    o = sgd(model)
    seen = [loop(model, o, *batch) for batch in batches()]
    return whole(model), seen


def same(ranks, loop, setting, **more):
    want, expected = plain(loop)
    for found, seen in ranks.run(sharded, loop, setting, *more):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12)


# --- parameters between forward and backward --------------------------------------------------------
PROBE = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(2, 6)


def zero_between(model, o, x, y):
    loss = mse_loss(model(x), y)
    model.zero_grad()
    loss.backward()
    o.step()


def erase_between(model, o, x, y):
    loss = mse_loss(model(x), y)
    for p in model.parameters():
        p.grad = None
    loss.backward()
    o.step()


def forward_before_step(model, o, x, y):
    mse_loss(model(x), y).backward()
    model(PROBE)
    o.step()
    o.zero_grad()
    with torch.no_grad():
        return model(PROBE)


def evaluate_before_step(model, o, x, y):
    mse_loss(model(x), y).backward()
    with torch.no_grad():
        model(PROBE)
    o.step()
    o.zero_grad()
    with torch.no_grad():
        return model(PROBE)


def segment_before_step(model, o, x, y):
    """A module of the model is called alone."""
    mse_loss(model(x), y).backward()
    model[0](PROBE)
    o.step()
    o.zero_grad()
    return model[0](PROBE).detach()


def change_by_hand(model, o, x, y):
    model(PROBE)
    with torch.no_grad():
        for p in model.parameters():
            p.data.mul_(0.9)
    mse_loss(model(x), y).backward()
    o.step()
    o.zero_grad()


def two_forwards(model, o, x, y):
    a, b = mse_loss(model(x), y), mse_loss(model(-x), y)
    model.zero_grad()
    a.backward()
    b.backward()
    o.step()


def infer(model, o, x, y):
    with torch.inference_mode():
        seen = model(PROBE)
    mse_loss(model(x), y).backward()
    o.step()
    o.zero_grad()
    return seen.clone()


def forward_that_fails(model, o, x, y):
    with contextlib.suppress(RuntimeError):
        model(torch.ones(2, 7, dtype=torch.float64))
    mse_loss(model(x), y).backward()
    o.step()
    o.zero_grad()


LOOPS = [
    zero_between, erase_between, forward_before_step, evaluate_before_step, change_by_hand,
    two_forwards, infer, forward_that_fails,
]  # fmt: skip


@each_setting
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_a_loop_equals_one_rank(ranks, loop, setting):
    same(ranks, loop, setting)


@pytest.mark.parametrize("setting", [SETTINGS["segments"], SETTINGS["empty root"]], ids=["segments", "empty root"])
def test_a_segment_can_be_called_alone(ranks, setting):
    same(ranks, segment_before_step, setting)


def evaluate(model):
    with torch.no_grad():
        return model(PROBE)


def flushed(setting):
    model, o = armed(setting, gradient_merge={"k_steps": 2})
    x, y = mine(batches()[0])
    mse_loss(model(x), y).backward()
    o.step()
    o.zero_grad()
    before = evaluate(model)
    fleet.flush()
    return before, evaluate(model), whole(model)


@each_setting
def test_a_flush_after_an_evaluation_changes_the_outputs(ranks, setting):
    want, _ = plain_steps(1)
    for before, after, found in ranks.run(flushed, setting):
        torch.testing.assert_close(before, net()(PROBE).detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(after, want(PROBE).detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, whole(want), rtol=1e-12, atol=1e-12)


def plain_steps(n):
    model = net()
    o = sgd(model)
    for x, y in batches()[:n]:
        o.zero_grad()
        mse_loss(model(x), y).backward()
        o.step()
    return model, o


def saved_and_loaded(setting, folder, look):
    model, o = armed(setting)
    step = lambda i: zero_between(model, o, *mine(batches()[i]))  # noqa: E731
    step(0)
    look(model)
    fleet.save(folder)
    step(1)
    look(model)
    fleet.load(folder)
    outputs = evaluate(model)
    step(1)
    return outputs, whole(model)


def forward_only(model):
    model(PROBE)


@each_setting
@pytest.mark.parametrize("look", [evaluate, forward_only], ids=["no_grad", "grad"])
def test_a_checkpoint_after_an_evaluation(ranks, tmp_path, setting, look):
    one, two = plain_steps(1)[0], plain_steps(2)[0]
    for outputs, found in ranks.run(saved_and_loaded, setting, str(tmp_path / "saved"), look):
        torch.testing.assert_close(outputs, one(PROBE).detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, whole(two), rtol=1e-12, atol=1e-12)


# --- what the engine does to a backward -------------------------------------------------------------
def weighted(setting, k):
    model, o = armed(setting, gradient_merge={"k_steps": k})
    sizes = [[3, 1], [2, 4], [1, 5], [4, 1]]
    for (x, y), size in zip(batches(), sizes, strict=True):
        x, y = (t[: sum(size)].split(size)[fleet.worker_index()] for t in (x, y))
        fleet.weight(len(x))
        mse_loss(model(x), y).backward()
        o.step()
        o.zero_grad()
    return whole(model)


@each_setting
@pytest.mark.parametrize("k", [1, 2])
def test_weights_give_the_big_batch(ranks, setting, k):
    model = net()
    o = sgd(model)
    parts = [(x[:n], y[:n]) for (x, y), n in zip(batches(), (4, 6, 6, 5), strict=True)]
    for i in range(0, 4, k):
        o.zero_grad()
        x, y = (torch.cat([part[j] for part in parts[i : i + k]]) for j in (0, 1))
        mse_loss(model(x), y).backward()
        o.step()
    for found in ranks.run(weighted, setting, k):
        torch.testing.assert_close(found, whole(model), rtol=1e-12, atol=1e-12)


def attacked(setting):
    """A backward to the inputs, before the weight of the step is given."""
    model, o = armed(setting)
    for batch in batches():
        x, y = mine(batch)
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(mse_loss(model(x), y), x)
        x = (x + 0.1 * slope.sign()).detach()
        fleet.weight(len(x))
        mse_loss(model(x), y).backward()
        o.step()
        o.zero_grad()
    return whole(model)


@each_setting
def test_a_backward_to_the_inputs_is_no_training(ranks, setting):
    model = net()
    o = sgd(model)
    for x, y in batches():
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(mse_loss(model(x), y), x)
        o.zero_grad()
        mse_loss(model((x + 0.1 * slope.sign()).detach()), y).backward()
        o.step()
    for found in ranks.run(attacked, setting):
        torch.testing.assert_close(found, whole(model), rtol=1e-12, atol=1e-12)


def penalized(setting):
    model, _ = armed(setting)
    x = PROBE.clone().requires_grad_()
    with pytest.raises(UsageError) as error:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return str(error.value)


@each_setting
def test_a_gradient_penalty_is_an_error(ranks, setting):
    for message in ranks.run(penalized, setting):
        assert "create_graph=True" in message
        assert "turn sharding off" in message


def other_memory(model, o, x, y):
    """As scripts prune or decay by hand."""
    mse_loss(model(x), y).backward()
    o.step()
    o.zero_grad()
    for p in model.parameters():
        p.data = p.data * 0.9


def raised(loop, setting):
    with pytest.raises(UsageError) as error:
        sharded(loop, setting)
    return str(error.value)


@each_setting
def test_what_would_be_lost_is_an_error(ranks, setting):
    for found in ranks.run(raised, other_memory, setting):
        assert "`p.data = ...` has no effect on the sharded parameter '0.weight': change it in place, with" in found


def backward_to_some(setting):
    model, o = armed(setting)
    x, y = mine(batches(1)[0])
    mse_loss(model(x), y).backward(inputs=list(model[2].parameters()))
    with pytest.warns(UserWarning, match=r"Under sharding, backward\(inputs=...\).* do not reach parameters"):
        o.step()


@each_setting
def test_a_backward_that_does_not_reach_shards_is_told(ranks, setting):
    ranks.run(backward_to_some, setting)


def released_between(setting):
    """Two trainings of the same objects, with plain ones between."""
    model, o = armed(setting)
    for i, batch in enumerate(batches()):
        if i == 2:
            fleet.release(model)
            declared = {"sharding": {"sharding_degree": fleet.worker_num(), **setting}}
            model, o = fleet.distribute(model, o, fleet.DistributedStrategy(**declared))
        zero_between(model, o, *mine(batch))
    return whole(model)


@each_setting
def test_a_released_model_can_be_sharded_again(ranks, setting):
    want, _ = plain(zero_between)
    for found in ranks.run(released_between, setting):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


# --- the norm ---------------------------------------------------------------------------------------
def clipped(scale, dtype):
    fleet.init()
    model = nn.Linear(1, 2, bias=False, dtype=dtype)  # one number per rank: the norm of several overflows in torch
    nn.init.ones_(model.weight)
    model, o = fleet.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        fleet.DistributedStrategy(sharding={"sharding_degree": 2}, clip={"clip_norm": 1.0}),
    )
    (model(torch.ones(1, 1, dtype=dtype)).sum() * scale).backward()
    o.step()
    return whole(model)["weight"]


@pytest.mark.parametrize("scale", [1e20, 1e-20, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_clip_neither_overflows_nor_rounds_to_float32(ranks, scale, dtype):
    weight = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    weight.grad = torch.full_like(weight, scale)
    nn.utils.clip_grad_norm_(weight, 1.0)
    want = (weight - weight.grad).detach()
    for found in ranks.run(clipped, scale, dtype):
        torch.testing.assert_close(found.double(), want, rtol=1e-15 if dtype is torch.float64 else 1e-6, atol=0)
