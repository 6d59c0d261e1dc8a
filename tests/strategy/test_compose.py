"""The order is derived from what the parts declare; so are the conflicts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fleetx import StrategyError
from fleetx.parts.amp import AMP
from fleetx.parts.clip import Clip
from fleetx.parts.data_parallel import DataParallel
from fleetx.parts.gradient_merge import GradientMerge
from fleetx.parts.recompute import Recompute
from fleetx.parts.sync_batch_norm import SyncBatchNorm
from fleetx.strategy.compose import compose, first
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class Sparse(Part):
    """Takes the reduction, wants an unscaled gradient, and leaves momentum in it."""

    @at(Stage.REDUCE, bars={Fact.SCALED}, makes={Fact.MOMENTUM})
    def send(self, bucket, ctx): ...


@settings
class Alone(Part):
    """Takes the reduction too."""

    @at(Stage.REDUCE, makes={Fact.LOCAL})
    def nothing(self, bucket, ctx): ...


@settings
class Rule(Part):
    """An update rule that has momentum of its own."""

    @at(Stage.UPDATE, bars={Fact.MOMENTUM})
    def update(self, optimizer, ctx): ...


@settings
class Hungry(Part):
    @at(Stage.GRADIENT, needs={Fact.PARTED})
    def eat(self, grads, ctx): ...


@settings
class Chicken(Part):
    @at(Stage.GRADIENT, needs={Fact.LOCAL}, makes={Fact.PARTED})
    def hatch(self, grads, ctx): ...


@settings
class Egg(Part):
    @at(Stage.GRADIENT, needs={Fact.PARTED}, makes={Fact.LOCAL})
    def lay(self, grads, ctx): ...


FP16 = AMP(init_loss_scaling=1024.0)


def names(parts):
    return [a.name for a in compose(parts).acts]


def test_the_order_is_derived_and_ignores_the_order_of_declaration():
    parts = [GradientMerge(k_steps=4), FP16, Clip(), Rule(), DataParallel()]
    want = names(parts)
    assert want.index("AMP.unscale") < want.index("Clip.shrink")
    assert want.index("GradientMerge.mean") < want.index("Clip.shrink")
    for again in itertools.permutations(parts):
        assert names(again) == want


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Sparse(), Alone()], "Alone.nothing and Sparse.send each want the REDUCE stage for themselves: keep one"),
        ([Sparse(), FP16], "Sparse.send cannot take a gradient multiplied by a loss scale, which AMP.scale makes it"),
        (
            [Sparse(), Rule()],
            "Rule.update cannot take a gradient that carries momentum already, which Sparse.send makes it",
        ),
        ([Hungry()], "Hungry.eat needs a gradient of which this rank holds only a part, and no part makes it so"),
        ([Chicken(), Egg()], "each need the other to run first"),
        (
            [Clip(), Sparse()],
            "Clip.shrink cannot take a gradient that carries momentum already, which Sparse.send makes it",
        ),
    ],
)
def test_a_conflict_is_derived_and_names_both_sides(parts, message):
    with pytest.raises(StrategyError, match=message):
        compose(parts)


def test_all_conflicts_come_at_once():
    with pytest.raises(StrategyError) as caught:
        compose([Sparse(), Alone(), FP16, Rule(), Hungry()])
    assert len(caught.value.problems) >= 4


def test_bf16_has_no_scale_so_what_bars_one_accepts_it():
    assert "Sparse.send" in names([Sparse(), AMP(dtype="bfloat16")])


def test_a_plan_knows_what_is_true_when_each_act_is_called():
    plan = compose([GradientMerge(k_steps=4), FP16, Clip()])
    (clip,) = [a for a in plan.acts if a.name == "Clip.shrink"]
    (unscale,) = [a for a in plan.acts if a.name == "AMP.unscale"]
    assert plan.facts_at(clip) == frozenset()
    assert Fact.SCALED in plan.facts_at(unscale)


BUILT = [FP16, AMP(dtype="bfloat16"), Recompute(checkpoints=["0"]), GradientMerge(k_steps=2), Clip(), SyncBatchNorm()]


@pytest.mark.parametrize("n", range(len(BUILT) + 1))
def test_every_subset_of_the_built_parts_composes(n):
    for parts in itertools.combinations(BUILT, n):
        if sum(isinstance(p, AMP) for p in parts) < 2:
            assert compose([*parts, DataParallel()])


class _Moment:
    def __init__(self, state):
        self.state, self.divisor, self.device = state, 4.0, torch.device("cpu")

    def anywhere(self, found):
        return bool(found)

    def norm(self, grads):
        return nn.utils.get_total_norm(grads)


@pytest.mark.parametrize(
    "parts", [[GradientMerge(k_steps=4), Clip(clip_norm=0.01), FP16], [GradientMerge(k_steps=4), FP16]]
)
def test_acts_whose_order_the_facts_leave_open_commute(parts):
    """Run every legal order of the GRADIENT stage and compare."""
    plan = compose(parts)
    acts = plan.at(Stage.GRADIENT)
    facts = plan.facts_at(acts[0])
    results = []
    for order in itertools.permutations(acts):
        if any(first(b, a, facts) for i, a in enumerate(order) for b in order[i + 1 :]):
            continue
        torch.manual_seed(0)
        grads = [torch.randn(3) * 100 for _ in range(4)]
        state = {type(p): p.init({"p": nn.Parameter(torch.zeros(1))}) for p in parts}
        for act in order:
            assert act.call(grads, _Moment(state[type(act.part)])) is not False
        results.append(torch.cat(grads))
    assert len(results) > 1
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
