"""The peak stays within the budget, as the allocator sees it, and training equals plain training bit for bit."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from covering import covering
from fleetx import StrategyError, fleet
from fleetx.base import cache
from fleetx.base.sizes import format_bytes
from fleetx.measure import allocator
from fleetx.measure.fake_step import TrainingStep
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


OTHERS = [{}, {"amp": {"dtype": "bfloat16"}}, {"gradient_merge": {"k_steps": 2}}]


@pytest.mark.parametrize(("kind", "share", "others"), covering(list(MODELS), [0.9, 0.8, "min"], OTHERS, strength=1))
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
    """The peak of a step according to the allocator, including what is always there."""

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


def convolutions():
    return Convolutions(4, 16), images(16)


def transformer():
    return Transformer(3, 64), tokens(16, 64)


@pytest.mark.parametrize(("make", "optimizer"), covering([convolutions, transformer], [adam, sgd], strength=1))
def test_the_peak_is_as_predicted_and_within_the_budget(make, optimizer):
    plain, inputs = make()
    planner = budget.Planner(TrainingStep(plain, optimizer(plain), inputs))
    predicted = planner.plain.peak
    assert predicted == pytest.approx(measured(plain, optimizer(plain), inputs, nullcontext), rel=0.01)
    least = planner.choose("min").peak
    for share in (1.0, 0.5, 0.0):
        limit = int(least + share * (predicted - least))
        plan = planner.choose(f"{limit}B")
        assert plan.peak <= limit
        model, _ = make()
        forward = plan.install(model, nullcontext) if plan.tree else nullcontext
        found = measured(model, optimizer(model), inputs, forward)
        rng_states = 5056 * sum(isinstance(m, nn.Dropout) for m in model.modules())
        assert found <= limit * 1.001 + rng_states
        assert plan.peak == pytest.approx(found, rel=0.01, abs=rng_states)


@pytest.mark.nightly
def test_more_bytes_never_take_more_time():
    make, inputs = MODELS["transformer"]
    model = make()
    planner = budget.Planner(TrainingStep(model, sgd(model), inputs()), timed=False)
    plain, least = planner.plain.peak, planner.choose("min").peak
    added = [planner.choose(f"{least + share * (plain - least) // 4}B").added for share in range(5)]
    assert added == sorted(added, reverse=True)
    assert added[0] > 0.0 == added[-1]


def test_a_budget_that_is_too_small_is_an_error_with_the_minimum():
    fleet.init()
    model = Convolutions(2)
    strategy = fleet.DistributedStrategy(recompute={"memory_budget": "100KiB"})
    model, _ = fleet.distribute(model, sgd(model), strategy)
    with pytest.raises(StrategyError) as caught:
        model(*images())
    text = str(caught.value)
    plain = Convolutions(2)
    least = budget.choose(TrainingStep(plain, sgd(plain), images()), "min", timed=False).peak
    assert "does not fit into 100.0 KiB" in text
    assert format_bytes(least) in text
    assert "micro-batch" in text


def test_the_user_s_model_and_random_state_do_not_change():
    model, inputs = Convolutions(2), images
    model(*inputs()).sum().backward()
    before = weights(model) | {k: p.grad.clone() for k, p in model.named_parameters()}
    torch.manual_seed(11)
    state = torch.get_rng_state()
    budget.choose(TrainingStep(model, adam(model), inputs()), "min")  # runs blocks for real
    assert torch.equal(state, torch.get_rng_state())
    assert_equal(before, weights(model) | {k: p.grad for k, p in model.named_parameters()})
    assert not any("forward" in vars(m) for m in model.modules())


def test_only_larger_inputs_are_planned_again_and_explain_shows_the_plans(caplog):
    caplog.set_level(logging.INFO)
    fleet.init()
    model = Convolutions(2)
    strategy = fleet.DistributedStrategy(recompute={"memory_budget": "min"})
    model, _ = fleet.distribute(model, sgd(model), strategy)
    for n in (4, 2, 4, 8):
        model(*images(n)).sum().backward()
    assert caplog.text.count("blocks are recomputed") == 2
    assert "blocks are recomputed" in str(fleet.explain(model=model))


def test_a_plan_is_stored_and_found_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FLEETX_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO)
    settings = {"recompute": {"memory_budget": 0.9}}
    first = train("convolutions", settings)
    assert len(list((tmp_path / "recompute").iterdir())) == 1
    caplog.clear()
    assert_equal(train("convolutions", settings), first)
    assert "blocks are recomputed" not in caplog.text  # nothing was planned
    train("convolutions", {"recompute": {"memory_budget": 0.8}})
    assert len(list((tmp_path / "recompute").iterdir())) == 2
    next((tmp_path / "recompute").iterdir()).write_text("{")
    assert_equal(train("convolutions", settings), first)


def test_a_folder_that_cannot_be_written_only_warns(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEETX_CACHE", str(tmp_path / "file"))
    train("convolutions", {"recompute": {"memory_budget": 0.9}}, steps=1)
    assert "could not be stored" in caplog.text


def test_nothing_is_stored_if_fleetx_cache_is_empty():
    assert cache.folder("recompute") is None


def test_a_model_without_gradients_is_an_error():
    fleet.init()
    model = nn.Linear(2, 2).requires_grad_(False)
    strategy = fleet.DistributedStrategy(recompute={"memory_budget": "min"})
    with pytest.raises(StrategyError, match="no parameter requires a gradient"):
        fleet.distribute(model, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), strategy)


def test_offload_of_a_model_in_host_memory_is_an_error():
    fleet.init()
    model = Transformer()
    strategy = fleet.DistributedStrategy(recompute={"checkpoints": ["layers.*"], "enable_offload": True})
    with pytest.raises(StrategyError, match="the model is already in host memory"):
        fleet.distribute(model, sgd(model), strategy)
