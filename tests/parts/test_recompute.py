"""Gradients equal those of the plain model bit for bit; the second pass is exactly one forward of the named modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.flop_counter import FlopCounterMode

from covering import covering
from fleetx import StrategyError, UsageError, fleet
from training import assert_equal, sgd, weights


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.bn = nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width)
        self.drop, self.down = nn.Dropout(0.3), nn.Linear(4 * width, width)

    def forward(self, x, scale=1.0):
        return x + self.down(self.drop(torch.relu(self.bn(self.up(x))))) * scale


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(6) for _ in range(3)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def _train(declared, steps=3, make=Tower):
    fleet.init()
    model = make()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    torch.manual_seed(7)
    for _ in range(steps):
        x, y = torch.randn(5, 6), torch.randn(5, 3)
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


AMPS = [{}, {"amp": {"dtype": "bfloat16"}}, {"amp": {"dtype": "float16"}}]
MERGES = [{}, {"gradient_merge": {"k_steps": 2}}]
NAMES = [["blocks.0"], ["blocks.*"], ["blocks.1", "blocks.2.bn"], ["blocks.?"]]


@pytest.mark.parametrize(("amp", "merge", "names"), covering(AMPS, MERGES, NAMES))
def test_training_is_the_same_bit_for_bit_with_dropout_and_batchnorm(amp, merge, names):
    """The comparison includes BatchNorm's statistics, which must be updated once, not twice."""
    recompute = {"recompute": {"checkpoints": names}}
    assert_equal(_train(amp | merge | recompute), _train(amp | merge))


def test_two_ranks_train_the_same_with_and_without_it(ranks):
    declared = {"recompute": {"checkpoints": ["blocks.*"]}, "sync_batch_norm": True}
    with_it = ranks.run(_train, declared)
    without = ranks.run(_train, {"sync_batch_norm": True})
    assert_equal(with_it[0], with_it[1])
    assert_equal(with_it[0], without[0])


def test_it_costs_one_more_forward_of_each_segment_up_to_the_last_value_that_backward_needs():
    """In exact FLOPs. Backward needs the inputs of `down` but not its output, so it does not run at a segment's end."""
    up = down = 2 * 5 * 6 * 24
    assert _flops(["blocks.0"]) - _flops([]) == up
    assert _flops(["blocks.1"]) - _flops([]) == up + down + up  # one segment of two blocks
    assert _flops(["blocks.0", "blocks.1"]) - _flops([]) == up + up
    assert _flops(["blocks.*"]) - _flops([]) == 3 * up  # and nothing after the last


def _flops(names):
    fleet.init()
    model = Tower()
    declared = {"recompute": {"checkpoints": names}} if names else {}
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(5, 6)).sum().backward()
    return counter.get_total_flops()


def test_the_inside_of_the_named_modules_is_not_kept():
    kept = {name: _kept_bytes([name] if name else []) for name in ("", "blocks.0", "blocks.*")}
    assert kept["blocks.*"] < kept["blocks.0"] < kept[""]


def _kept_bytes(names):
    fleet.init()
    model = Tower()
    declared = {"recompute": {"checkpoints": names}} if names else {}
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    sizes = []
    own = {p.data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (sizes.append(t.nbytes) if t.data_ptr() not in own else None, t)[1], lambda t: t
    ):
        model(torch.randn(64, 6))
    return sum(sizes)


def test_nothing_is_recomputed_without_gradients():
    fleet.init()
    model = Tower().eval()
    strategy = fleet.DistributedStrategy(recompute={"checkpoints": ["blocks.*"]})
    model, _ = fleet.distribute(model, sgd(model), strategy)
    x = torch.randn(5, 6)
    with torch.no_grad():
        assert torch.equal(model(x), Tower().eval()(x))


def test_a_copy_of_the_model_runs_its_own_weights():
    fleet.init()
    model = Tower()
    strategy = fleet.DistributedStrategy(recompute={"checkpoints": ["blocks.*"]})
    model, _ = fleet.distribute(model, sgd(model), strategy)
    twin = copy.deepcopy(model).eval()
    model.eval()
    x = torch.randn(5, 6)
    assert torch.equal(model(x), twin(x))
    nn.init.zeros_(twin.blocks[0].down.weight)
    assert not torch.equal(model(x), twin(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (True, "checkpoints is empty"),
        ({"memory_budget": "1GiB", "checkpoints": ["blocks.0"]}, "cannot both be set"),
        ({"memory_budget": "much"}, "'much' is not a number of bytes: .*'6GiB'.* or 'min'"),
        ({"memory_budget": 1.5}, "memory_budget"),
    ],
)
def test_settings_that_would_have_no_effect_are_errors(settings, message):
    with pytest.raises(StrategyError, match=message):
        fleet.DistributedStrategy(recompute=settings).plan()


def test_an_unknown_module_is_an_error_with_the_nearest_names():
    fleet.init()
    model = Tower()
    strategy = fleet.DistributedStrategy(recompute={"checkpoints": ["blocks.0", "block.1", "zzz.*"]})
    with pytest.raises(StrategyError) as caught:
        fleet.distribute(model, sgd(model), strategy)
    assert len(caught.value.problems) == 2
    assert "no module 'block.1': did you mean 'blocks.1'" in caught.value.problems[0]
    assert "no module 'zzz.*'" in caught.value.problems[1]


class Counter(nn.Module):
    """Reads buffers that it also changes, in place and by assignment."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.ones(1))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        y = self.layer(x) * self.seen.clone() - self.mean
        self.seen.add_(1)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Counter()

    def forward(self, x):
        return self.body(x).tanh()


def test_a_module_that_reads_a_buffer_it_changes_is_replayed_from_the_value_it_found():
    assert_equal(_train({"recompute": {"checkpoints": ["body"]}}, make=Stateful), _train({}, make=Stateful))


def test_backward_may_run_twice():
    grads = []
    for declared in ({}, {"recompute": {"checkpoints": ["blocks.*"]}}):
        fleet.init()
        model = Tower()
        model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
        torch.manual_seed(3)
        loss = model(torch.randn(5, 6)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append({k: p.grad for k, p in model.named_parameters()})
    assert_equal(*grads)


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_models_recompute_too(when):
    def make():
        return torch.compile(Tower(), backend="aot_eager") if when == "before" else Tower()

    fleet.init()
    model = make()
    strategy = fleet.DistributedStrategy(recompute={"checkpoints": ["blocks.*"]})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    if when == "after":
        model = torch.compile(model, backend="aot_eager")
    torch.manual_seed(7)
    for _ in range(3):
        x, y = torch.randn(5, 6), torch.randn(5, 3)
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {k.removeprefix("_orig_mod."): v for k, v in weights(model).items()}
    torch.testing.assert_close(found, _train({}), rtol=1e-4, atol=1e-5)


def test_the_second_pass_has_the_precision_of_the_first():
    """A part of the model that its author keeps in float32, and one on the black list."""

    class Careful(Tower):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    amp = {"amp": {"dtype": "bfloat16"}}
    recompute = {"recompute": {"checkpoints": ["blocks.*"]}}
    assert_equal(_train(amp | recompute, make=Careful), _train({}, make=Careful))
    black = {"amp": {"dtype": "bfloat16", "custom_black_list": ["blocks.0", "blocks.1"]}}
    assert_equal(_train(black | recompute), _train(black))


def test_patterns_match_level_by_level_and_containers_are_errors():
    fleet.init()
    model = Tower()
    for name in ("blocks", "block?"):
        strategy = fleet.DistributedStrategy(recompute={"checkpoints": [name]})
        with pytest.raises(StrategyError, match=r"'blocks' has no forward of its own.*use 'blocks.\*'"):
            fleet.distribute(model, sgd(model), strategy)
    fleet.distribute(model, sgd(model), fleet.DistributedStrategy(recompute={"checkpoints": ["blocks.*"]}))
    assert [n for n, m in model.named_modules() if "forward" in vars(m)] == [
        *("blocks.0", "blocks.1", "blocks.2", "head")
    ]


def test_a_filled_cache_is_an_error():
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    fleet.init()
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=8))
    strategy = fleet.DistributedStrategy(recompute={"checkpoints": ["transformer.h.*"]})
    model, _ = fleet.distribute(model, sgd(model), strategy)
    cache = DynamicCache(config=model.config)
    cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    with pytest.raises(UsageError, match="filled cache"):
        model(torch.zeros(1, 2, dtype=torch.long), past_key_values=cache)
