"""However a model is cut, its gradients, statistics and random numbers equal those of the plain one bit for bit."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from covering import covering
from fleetx import StrategyError, UsageError, fleet
from fleetx.base.module_names import named_modules
from fleetx.measure import block_profile
from fleetx.measure.fake_step import TrainingStep
from fleetx.parts.recompute import segments
from fleetx.parts.recompute.chain import Chain
from fleetx.parts.recompute.offload import Offload
from small_models import MODELS
from training import assert_equal, sgd, weights


def cut(model, names, tree, host=None):
    modules = dict(named_modules(model))
    return Chain({n: modules[n] for n in names}, segments.PlannedSegments(names, tree), nullcontext, host).forward


def gradients(model, inputs, forward=nullcontext, steps=2):
    torch.manual_seed(3)
    out = {}
    for step in range(steps):
        with forward():
            result = model(*inputs)
        result.square().mean().backward()
        out |= {f"{step}.{k}": p.grad.clone() for k, p in model.named_parameters()}
    return out | {k: b.clone() for k, b in model.named_buffers()}


@cache
def names_of(kind, number):
    """The blocks of a coarse (0) or fine (1) profile."""
    make, inputs = MODELS[kind]
    model = make()
    return block_profile.profile_blocks(TrainingStep(model, sgd(model), inputs()), timed=False)[number].names


TREES = {
    "each alone": lambda n: [[i] for i in range(n)],
    "one": lambda n: [list(range(n))],
    "threes": lambda n: [list(range(i, min(i + 3, n))) for i in range(0, n, 3)],
    "every other": lambda n: [i if i % 2 else [i] for i in range(n)],
    "nested": lambda n: [[0, [1, 2], 3], *range(4, n - 3), [[n - 3, n - 2], n - 1]],
    "three deep": lambda n: [[0, [1, [2, 3], 4], [5]], *range(6, n)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("tree", "kind", "level", "host"), covering(list(TREES), list(MODELS), [0, 1], ["", "offload"])
)
def test_all_segments_give_the_same_result(tree, kind, level, host):
    make, inputs = MODELS[kind]
    names = names_of(kind, level)
    if len(names) < 7:
        names = names_of(kind, 1)
    model = make()
    forward = cut(model, names, TREES[tree](len(names)), Offload(torch.device("cpu")) if host else None)
    assert_equal(gradients(model, inputs(), forward), gradients(make(), inputs()))


def test_a_segment_is_recomputed_once_and_a_nested_one_twice():
    make, inputs = MODELS["transformer"]
    names = names_of("transformer", 0)
    layers = [i for i, n in enumerate(names) if n.startswith("layers.")]

    def flops(tree):
        model = make()
        forward = cut(model, names, tree) if tree else nullcontext
        with FlopCounterMode(display=False) as counter:
            gradients(model, inputs(), forward, steps=1)
        return counter.get_total_flops()

    first, second = layers[:2]
    with FlopCounterMode(display=False) as counter:
        make().layers[0](torch.randn(8, 16, 32), torch.zeros(16, 16))
    layer = counter.get_total_flops()
    plain = flops(None)
    assert flops([*range(first), [first, second], *range(second + 1, len(names))]) - plain == 2 * layer
    assert flops([*range(first), [[first], second], *range(second + 1, len(names))]) - plain == 3 * layer


def test_what_is_held_is_freed_with_the_graph_and_without_the_garbage_collector():
    make, inputs = MODELS["transformer"]
    names = names_of("transformer", 0)
    model = make()
    forward = cut(model, names, [list(range(len(names)))])
    held = []
    model.layers[0].register_forward_pre_hook(lambda m, args: held.append(weakref.ref(args[0])))
    gc.disable()
    try:
        with forward():
            out = model(*inputs()).sum()
        out.backward()
        del out
        assert all(ref() is None for ref in held)
    finally:
        gc.enable()


def test_the_same_module_may_be_called_many_times():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

        def forward(self, x):
            for _ in range(4):
                x = self.drop(torch.relu(self.layer(x)))
            return x

    def train(declared):
        fleet.init()
        model = Shared()
        model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(5, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    for settings in ({"checkpoints": ["drop"]}, {"checkpoints": ["layer"]}, {"memory_budget": "min"}):
        assert_equal(train({"recompute": settings}), train({}))


def test_modules_in_another_order_are_an_error():
    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.turned = nn.Linear(4, 4), nn.Linear(4, 4), False

        def forward(self, x):
            return self.b(self.a(x)) if not self.turned else self.a(self.b(x))

    model = Turning()
    forward = cut(model, ["a", "b"], [[0], 1])
    with forward():
        model(torch.randn(2, 4))
    model.turned = True
    with pytest.raises(UsageError, match="call 0 was to 'b' instead of 'a'"), forward():
        model(torch.randn(2, 4))


def test_a_name_inside_another_is_an_error():
    fleet.init()
    model = MODELS["transformer"][0]()
    strategy = fleet.DistributedStrategy(recompute={"checkpoints": ["layers.0", "layers.0.up"]})
    with pytest.raises(StrategyError, match=r"'layers.0.up' is inside 'layers.0': name only one"):
        fleet.distribute(model, sgd(model), strategy)


def test_a_named_module_that_is_not_called_is_mentioned(caplog):
    class Idle(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
            self.idle = nn.Identity()

        def forward(self, x):
            return self[2](self[1](self[0](x)))

    fleet.init()
    model = Idle()
    strategy = fleet.DistributedStrategy(recompute={"checkpoints": ["1", "idle"]})
    model, _ = fleet.distribute(model, sgd(model), strategy)
    model(torch.randn(2, 4)).sum().backward()
    assert "idle was not called in this forward" in caplog.text
    assert "idle was not called in the last forward" in str(fleet.explain(model=model))
