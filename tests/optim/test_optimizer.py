"""Lars and Lamb as ordinary optimizers of PyTorch."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.functional import mse_loss

from fleetx import fleet
from fleetx.optim import Lamb, Lars
from training import assert_close, assert_equal, batches, net, train, weights

KINDS = [pytest.param(lambda p, **k: Lars(p, lr=1.0, **k), id="Lars"), pytest.param(Lamb, id="Lamb")]
each = pytest.mark.parametrize("make", KINDS)


@each
def test_a_resumed_training_is_bit_identical(kernels, make):
    def run(model, optimizer, data):
        for x, y in data:
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    model, data = net(), batches(10)
    optimizer = make(model.parameters())
    run(model, optimizer, data[:5])
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = net()
    again.load_state_dict(saved[0])
    optimizer2 = make(again.parameters())
    optimizer2.load_state_dict(saved[1])
    assert_equal(run(model, optimizer, data[5:]), run(again, optimizer2, data[5:]))


@each
def test_a_copy_is_independent(kernels, make):
    """deepcopy and pickle copy everything: nothing is kept outside groups and state."""
    p = Parameter(torch.ones(5))
    optimizer = make([("some.bias", p)], exclude_from_weight_decay=["bias"])
    p.grad = torch.ones(5)
    optimizer.step()
    again = copy.deepcopy(optimizer)
    assert again.param_groups[0]["excluded"] == [0]
    q = again.param_groups[0]["params"][0]
    optimizer.step()
    q.grad = torch.ones(5)
    again.step()
    assert torch.equal(p, q)


@each
def test_step_calls_the_closure_with_gradients_and_returns_its_loss(make):
    p = Parameter(torch.ones(3))
    optimizer = make([p])

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert (p < 1).all()


@each
def test_schedulers_and_tensor_rates(kernels, make):
    p, q = Parameter(torch.ones(9)), Parameter(torch.ones(9))
    a, b = make([p]), make([q])
    for group in b.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]))
    for optimizer in (a, b):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        for _ in range(4):
            optimizer.param_groups[0]["params"][0].grad = torch.ones(9)
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=0)


@each
def test_parameters_without_a_gradient_do_not_change(kernels, make):
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer = make([p, q])
    p.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(q, torch.ones(3))
    assert q not in optimizer.state
    p.grad = None
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


@each
def test_sparse_gradients_raise_an_error_before_anything_changes(make):
    dense = nn.Linear(3, 3)
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = make([*dense.parameters(), *table.parameters()])
    dense(table(torch.tensor([1, 2]))).sum().backward()
    before = weights(dense)
    with pytest.raises(RuntimeError, match=r"sparse.*\(10, 3\).*sparse=False"):
        optimizer.step()
    assert_equal(weights(dense), before)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Lars, {"lr": -1.0}, "lr must be"),
        (Lars, {"lr": 1.0, "momentum": 1.0}, "momentum must be"),
        (Lars, {"lr": 1.0, "lars_coeff": -0.1}, "lars_coeff must be"),
        (Lars, {"lr": 1.0, "lars_coeff": 0.0}, "use lars_coeff=None"),
        (Lars, {"lr": 1.0, "weight_decay": -1.0}, "weight_decay must be"),
        (Lars, {"lr": 1.0, "epsilon": float("nan")}, "epsilon must be"),
        (Lars, {"lr": 1.0, "momentum": 0.0, "nesterov": True}, "nesterov needs"),
        (Lars, {"lr": 1.0, "differentiable": True}, "differentiable=False"),
        (Lars, {"lr": 1.0, "exclude_from_weight_decay": ["bias"]}, "named_parameters"),
        (Lamb, {"eps": -1e-6}, "eps must be"),
        (Lamb, {"betas": (0.9, 1.0)}, r"betas\[1\] must be"),
        (Lamb, {"weight_decay": -0.1}, "weight_decay must be"),
        (Lamb, {"differentiable": True}, "differentiable=False"),
    ],
    ids=str,
)
def test_bad_options(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind([Parameter(torch.ones(2))], **options)


@each
def test_bad_groups_and_parameters(make):
    with pytest.raises(ValueError, match="weight_decay must be"):
        make([{"params": [Parameter(torch.ones(2))], "weight_decay": -1.0}])
    with pytest.raises(ValueError, match="complex64"):
        make([Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="'norm' matches no parameter name"):
        make([("a.bias", Parameter(torch.ones(2)))], exclude_from_weight_decay=["bias", "norm"])
    optimizer = make([Parameter(torch.ones(2))])
    other = torch.optim.RMSprop([Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="not a checkpoint of"):
        optimizer.load_state_dict(other.state_dict())


# --- shards ---------------------------------------------------------------------------------------
SHARDED = [
    pytest.param("lars", {"lr": 3.0, "lars_coeff": 0.01, "weight_decay": 0.01, "momentum": 0.9}, id="Lars"),
    pytest.param("lamb", {"lr": 0.03, "weight_decay": 0.01}, id="Lamb"),
]


def optimizer_of(kind, model, options):
    return {"lars": Lars, "lamb": Lamb}[kind](model.parameters(), **options)


@pytest.mark.parametrize(("kind", "options"), SHARDED)
def test_shards_use_the_norms_of_the_full_tensors(ranks, kind, options):
    """FSDP2 splits rows unevenly over ranks; the ratio must be that of the full tensor."""
    expected = train(batches(), optimizer=lambda model: optimizer_of(kind, model, options))
    for dtype in (None, torch.float64):
        for got in ranks.run(train_sharded, kind, options, dtype):
            assert_close({k: v.float() for k, v in got.items()}, expected)


def train_sharded(kind, options, dtype):
    fleet.init()
    model = net().to(dtype)
    fully_shard(model)
    optimizer = optimizer_of(kind, model, options)
    for x, y in batches():
        mse_loss(model(x.to(dtype)), y.to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(s, DTensor) for state in optimizer.state.values() for s in state.values() if s.dim())
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


# --- tensors that the flat kernels must not see, and state that must not be lost ---------------------
@each
def test_state_of_another_shape_raises_an_error(kernels, make):
    small, large = Parameter(torch.ones(10)), Parameter(torch.ones(200))
    a, b = make([small]), make([large])
    small.grad, large.grad = torch.ones(10), torch.ones(200)
    a.step()
    b.load_state_dict(a.state_dict())
    with pytest.raises(RuntimeError, match=r"has shape \(10,\), but its parameter has \(200,\)"):
        b.step()


@each
def test_tensors_whose_memory_is_not_their_value(make):
    for lazy in (torch._neg_view(torch.full((4,), -1.0)), torch._efficientzerotensor(4) + 1.0):
        p, q = Parameter(torch.full((4,), 2.0)), Parameter(torch.full((4,), 2.0))
        p.grad, q.grad = lazy, torch.ones(4)
        make([p]).step()
        make([q]).step()
        torch.testing.assert_close(p, q)
    p = Parameter(torch.full((4,), 2.0))
    p.grad = torch._efficientzerotensor(4)
    make([p], weight_decay=0.0).step()
    assert torch.equal(p.detach(), torch.full((4,), 2.0))


@each
def test_a_resumed_training_in_bf16_is_bit_identical(make):
    """torch would round the accumulators to the dtype of the parameter."""
    torch.manual_seed(0)
    grads = torch.randn(20, 50).bfloat16()
    p, q = Parameter(torch.ones(50).bfloat16()), Parameter(torch.ones(50).bfloat16())
    a, b = make([p]), make([q])
    for g in grads[:10]:
        p.grad = g
        a.step()
    q.data.copy_(p.data)
    b.load_state_dict(a.state_dict())
    for g in grads[10:]:
        p.grad, q.grad = g, g
        a.step()
        b.step()
    assert torch.equal(p, q)
    torch.testing.assert_close(a.state_dict()["state"], b.state_dict()["state"], rtol=0, atol=0)


@pytest.mark.parametrize("pattern", ["bias", [""]])
@each
def test_patterns_that_would_exclude_everything_raise_an_error(make, pattern):
    with pytest.raises(ValueError, match="must be a list of substrings"):
        make(net().named_parameters(), exclude_from_weight_decay=pattern)


@each
def test_exclusion_applies_to_groups_added_later(make):
    first, second = net(), nn.Linear(2, 2)
    optimizer = make(first.named_parameters(), exclude_from_weight_decay=["bias"])
    optimizer.add_param_group({"params": [("later.weight", second.weight), ("later.bias", second.bias)]})
    assert [group["excluded"] for group in optimizer.param_groups] == [[1, 3, 5], [1]]
    with pytest.raises(ValueError, match="without names"):  # from torch
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="not an option of a group"):
        make([{"params": [Parameter(torch.ones(2))], "exclude_from_weight_decay": ["bias"]}])


@each
def test_parameters_of_several_dtypes(kernels, make):
    params = [Parameter(torch.ones(4, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float64, torch.float16)]
    optimizer = make(params)
    optimizer.param_groups[0]["lr"] *= 50  # visible in the 8 bits of bf16
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all((p < 1).all() for p in params)
    dtypes = {s.dtype for state in optimizer.state.values() for s in state.values()}
    assert dtypes == {torch.float32, torch.float64}


def test_the_step_of_an_old_checkpoint_may_be_a_number():
    p = Parameter(torch.ones(4))
    optimizer = Lamb([p])
    p.grad = torch.ones(4)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = 1
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.state[p]["step"] == 2
