"""A budget is kept, as the allocator sees it; training under it is the plain one, bit for bit."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fleetx import StrategyError, fleet
from fleetx.base import cache
from fleetx.base.sizes import words
from fleetx.measure import allocator
from fleetx.measure.fake_step import Step, estimate
from fleetx.measure.tracker import bytes_of
from fleetx.parts.recompute import budget
from small_models import MODELS, Convolutions, Transformer, images, tokens
from training import assert_equal, sgd, weights

CPU = torch.device("cpu")


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(kind, declared, steps=3, optimizer=sgd):
    fleet.init()
    make, inputs = MODELS[kind]
    model = make()
    model, optimizer = fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))
    torch.manual_seed(7 + fleet.worker_index())
    for _ in range(steps):
        model(*inputs()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("share", [0.9, 0.8, "min"])
@pytest.mark.parametrize("others", [{}, {"amp": {"dtype": "bfloat16"}}, {"gradient_merge": {"k_steps": 2}}], ids=str)
def test_training_under_a_budget_is_the_same_bit_for_bit(kind, share, others):
    recompute = {"recompute": {"memory_budget": share}}
    assert_equal(train(kind, others | recompute), train(kind, others))


def both(declared):
    return train("convolutions", declared)


def test_on_two_ranks(ranks):
    with_it = ranks.run(both, {"recompute": {"memory_budget": 0.9}})
    assert_equal(with_it[0], ranks.run(both, {})[0])
    assert_equal(with_it[0], with_it[1])


def measured(model, optimizer, inputs, forward):
    """The most bytes of a step, by the allocator, with what is always there."""

    def step():
        with forward():
            out = model(*inputs)
        torch.log_softmax(out, -1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [s for values in optimizer.state.values() for s in values.values() if isinstance(s, torch.Tensor)]
    fixed = bytes_of([*model.parameters(), *model.buffers(), *inputs, *state])
    return fixed + allocator.peak(step, CPU)


@pytest.mark.parametrize(
    ("make", "inputs"), [(lambda: Convolutions(6, 16), images(16)), (lambda: Transformer(6, 64), tokens(16, 64))]
)
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_the_peak_is_as_predicted_and_within_the_budget(make, inputs, optimizer):
    plain = make()
    step = Step(plain, optimizer(plain), inputs)
    predicted = estimate(step)
    assert predicted.peak == pytest.approx(measured(plain, step.optimizer, inputs, nullcontext), rel=0.01)
    least = budget.choose(step, "min").peak
    for share in (1.0, 0.5, 0.0):
        limit = int(least + share * (predicted.peak - least))
        model = make()
        choice = budget.choose(Step(model, optimizer(model), inputs), f"{limit}B")
        assert choice.peak <= limit
        forward = choice.arm(model, nullcontext) if choice.tree else nullcontext
        found = measured(model, optimizer(model), inputs, forward)
        states = 5056 * sum(isinstance(m, nn.Dropout) for m in model.modules())  # of the random numbers
        assert found <= limit * 1.001 + states
        assert choice.peak == pytest.approx(found, rel=0.01, abs=states)


def test_more_bytes_never_take_more_time():
    make, inputs = MODELS["transformer"]
    model = make()
    step = Step(model, sgd(model), inputs())
    plain, least = estimate(step).peak, budget.choose(step, "min").peak
    added = [budget.choose(step, f"{least + share * (plain - least) / 4:.0f}B").added for share in range(1, 5)]
    assert added[-1] == 0.0
    assert all(a >= 0 for a in added)


def test_a_budget_that_cannot_be_met_says_the_least_and_what_helps():
    fleet.init()
    model = Transformer()
    strategy = fleet.DistributedStrategy(recompute={"memory_budget": "100KiB"})
    model, _ = fleet.distribute(model, sgd(model), strategy)
    with pytest.raises(StrategyError) as caught:
        model(*tokens())
    said = str(caught.value)
    plain = Transformer()
    least = budget.choose(Step(plain, sgd(plain), tokens()), "min").peak
    assert "100.0 KiB cannot be met" in said
    assert words(least) in said
    assert "micro-batch" in said


def test_the_user_s_model_and_random_numbers_are_left_alone():
    make, inputs = MODELS["convolutions"]
    model = make()
    model(*inputs()).sum().backward()
    before = weights(model) | {k: p.grad.clone() for k, p in model.named_parameters()}
    torch.manual_seed(11)
    state = torch.get_rng_state()
    budget.choose(Step(model, adam(model), inputs()), "min")
    assert torch.equal(state, torch.get_rng_state())
    assert_equal(before, weights(model) | {k: p.grad for k, p in model.named_parameters()})
    assert not any("forward" in vars(m) for m in model.modules())


def test_it_is_explained_and_planned_anew_for_larger_inputs_only(caplog):
    caplog.set_level(logging.INFO)
    fleet.init()
    model = Transformer()
    strategy = fleet.DistributedStrategy(recompute={"memory_budget": "min"})
    model, _ = fleet.distribute(model, sgd(model), strategy)
    for n in (4, 2, 4, 8):
        model(*tokens(n)).sum().backward()
    assert caplog.text.count("blocks are run again") == 2
    assert "blocks are run again" in str(fleet.explain(model=model))


def test_a_choice_is_stored_and_found_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FLEETX_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO)
    settings = {"recompute": {"memory_budget": 0.9}}
    first = train("transformer", settings)
    assert len(list((tmp_path / "recompute").iterdir())) == 1
    caplog.clear()
    assert_equal(train("transformer", settings), first)
    assert "blocks are run again" not in caplog.text  # nothing was probed
    train("transformer", {"recompute": {"memory_budget": 0.8}})
    assert len(list((tmp_path / "recompute").iterdir())) == 2
    next((tmp_path / "recompute").iterdir()).write_text("{")
    assert_equal(train("transformer", settings), first)


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEETX_CACHE", str(tmp_path / "file"))
    train("transformer", {"recompute": {"memory_budget": 0.9}}, steps=1)
    assert "could not be stored" in caplog.text


def test_nothing_is_stored_where_the_folder_is_empty():
    assert cache.folder("recompute") is None


def test_a_model_that_never_needs_gradients_is_refused():
    fleet.init()
    model = nn.Linear(2, 2).requires_grad_(False)
    strategy = fleet.DistributedStrategy(recompute={"memory_budget": "min"})
    with pytest.raises(StrategyError, match="no parameter needs a gradient"):
        fleet.distribute(model, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), strategy)


def test_offload_is_refused_where_the_model_is_in_host_memory_already():
    fleet.init()
    model = Transformer()
    strategy = fleet.DistributedStrategy(recompute={"checkpoints": ["layers.*"], "enable_offload": True})
    with pytest.raises(StrategyError, match="the model is in host memory already"):
        fleet.distribute(model, sgd(model), strategy)
