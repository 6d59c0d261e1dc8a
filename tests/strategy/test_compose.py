"""Both the order of acts and the conflicts between parts are derived from what parts declare."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import nn

from fleetx import StrategyError
from fleetx.parts.adaptive_localsgd import AdaptiveLocalSGD
from fleetx.parts.amp import AMP
from fleetx.parts.clip import Clip
from fleetx.parts.data_parallel import DataParallel
from fleetx.parts.dgc import DGC
from fleetx.parts.fp16_allreduce import FP16AllReduce
from fleetx.parts.gradient_merge import GradientMerge
from fleetx.parts.lars import LarsPart
from fleetx.parts.localsgd import LocalSGD
from fleetx.parts.recompute import Recompute
from fleetx.parts.sync_batch_norm import SyncBatchNorm
from fleetx.strategy.compose import compose, first
from fleetx.strategy.part import Part, claims, every, settings, switch_of
from fleetx.strategy.stage import Fact, Stage, at


@settings
class Sparse(Part):
    """Codes gradients, needs them unscaled, and leaves momentum in them."""

    switch = "sparse"

    @at(Stage.WIRE, bars={Fact.SCALED}, because="values would overflow", makes={Fact.MOMENTUM})
    def send(self, bucket, ctx): ...


@settings
class Alone(Part):
    """Exchanges no gradients."""

    switch = "alone"

    @at(Stage.REDUCE, makes={Fact.LOCAL})
    def nothing(self, bucket, ctx): ...


@settings
class Rule(Part):
    """An update rule with momentum of its own."""

    switch = "rule"

    @at(Stage.UPDATE, unbuilt={Fact.MOMENTUM})
    def update(self, optimizer, ctx): ...


@settings
class Hungry(Part):
    switch = "hungry"

    @at(Stage.GRADIENT, needs={Fact.PARTED})
    def eat(self, grads, ctx): ...


@settings
class Chicken(Part):
    switch = "chicken"

    @at(Stage.GRADIENT, needs={Fact.LOCAL}, makes={Fact.PARTED})
    def hatch(self, grads, ctx): ...


@settings
class Egg(Part):
    switch = "egg"

    @at(Stage.GRADIENT, needs={Fact.PARTED}, makes={Fact.LOCAL})
    def lay(self, grads, ctx): ...


FP16 = AMP(init_loss_scaling=1024.0)


def names(parts):
    return [a.name for a in compose(parts).acts]


def test_the_order_is_derived_and_ignores_the_order_of_declaration():
    parts = [GradientMerge(k_steps=4), FP16, Clip(), Rule(), DataParallel()]
    want = names(parts)
    assert want.index("amp.unscale") < want.index("clip.shrink")
    assert want.index("gradient_merge.mean") < want.index("clip.shrink")
    for again in itertools.permutations(parts):
        assert names(again) == want


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [Sparse(), FP16AllReduce()],
            "`fp16_allreduce` and `sparse` both compress what the ranks send, and a value can be compressed only once",
        ),
        (
            [LocalSGD(), Alone()],
            "`alone` and `localsgd` both decide what the ranks exchange, and they exchange one thing: use only one",
        ),
        (
            [LarsPart(), Rule()],
            "`lars` and `rule` both change the optimizer's update rule, and an update follows one rule: use",
        ),
        (
            [LocalSGD(), AdaptiveLocalSGD()],
            "`adaptive_localsgd` and `localsgd` both decide in which rounds the parameters are averaged, and",
        ),
        (
            [Sparse(), FP16],
            "`sparse` does not work with gradients multiplied by a loss scale, which `amp` produces, because values "
            "would overflow: turn one of them off",
        ),
        (
            [Sparse(), Rule()],
            "`rule` does not support `sparse` yet, which adds momentum to gradients: turn one of them off",
        ),
        ([Hungry()], "`hungry` needs parameters sharded across ranks, which nothing in this strategy produces: turn"),
        ([Chicken(), Egg()], "`chicken` each need the other to run first: use only one of them"),
        ([Clip(), Sparse()], "`clip` does not work with gradients that already contain momentum, which `sparse`"),
    ],
)
def test_a_conflict_is_derived_and_names_both_switches(parts, message):
    with pytest.raises(StrategyError) as caught:
        compose(parts)
    assert message in str(caught.value)


def test_three_switches_that_want_the_same_stage_are_one_problem():
    with pytest.raises(StrategyError) as caught:
        compose([Sparse(), DGC(), FP16AllReduce()])
    (problem,) = caught.value.problems
    assert problem.startswith("`dgc`, `fp16_allreduce` and `sparse` all compress what the ranks send")


def test_what_is_exchanged_and_how_it_is_coded_are_two_questions():
    plan = compose([Sparse(), Alone(), Clip()])  # clip bars momentum, which no gradient has where parameters are sent
    assert [act.name for act in plan.acts] == ["alone.nothing", "sparse.send", "clip.shrink"]


def test_two_switches_that_conflict_twice_are_one_problem():
    with pytest.raises(StrategyError) as caught:
        compose([DGC(momentum_correction=True), LarsPart()])
    assert len(caught.value.problems) == 1


def test_what_a_switch_lacks_because_of_another_is_not_a_second_problem():
    with pytest.raises(StrategyError) as caught:
        compose([DGC(momentum_correction=True), LocalSGD()])  # dgc's update needs the momentum, which is not made here
    (problem,) = caught.value.problems
    assert problem.startswith("`dgc` with momentum_correction=True does not work with gradients that differ between")


def test_all_conflicts_come_at_once():
    with pytest.raises(StrategyError) as caught:
        compose([Sparse(), FP16AllReduce(), FP16, Rule(), Hungry()])
    assert len(caught.value.problems) >= 4


def test_bf16_has_no_scale_so_what_bars_one_accepts_it():
    assert "sparse.send" in names([Sparse(), AMP(dtype="bfloat16")])


def test_a_plan_knows_what_is_true_when_each_act_is_called():
    plan = compose([GradientMerge(k_steps=4), FP16, Clip()])
    (clip,) = [a for a in plan.acts if a.name == "clip.shrink"]
    (unscale,) = [a for a in plan.acts if a.name == "amp.unscale"]
    assert plan.facts_at(clip) == frozenset()
    assert Fact.SCALED in plan.facts_at(unscale)


def test_dgc_leaves_the_momentum_to_another_update_rule():
    (dgc,) = [part for part in compose([DGC(), LarsPart()]).parts if isinstance(part, DGC)]
    assert dgc.momentum_correction is False
    assert compose([DGC()]).parts == (DGC(),)


def test_an_act_that_bars_a_fact_says_why_no_code_could_work_with_it():
    for part in every().values():
        for method, claim in claims(part).items():
            assert bool(claim.bars) == bool(claim.because), f"{part.__name__}.{method}: set because="
            assert not claim.bars & claim.unbuilt


BUILT = [FP16, AMP(dtype="bfloat16"), Recompute(checkpoints=["0"]), GradientMerge(k_steps=2), Clip(), SyncBatchNorm()]


@pytest.mark.parametrize("n", range(len(BUILT) + 1))
def test_every_subset_of_the_built_parts_composes(n):
    for parts in itertools.combinations(BUILT, n):
        if sum(isinstance(p, AMP) for p in parts) < 2:
            assert compose([*parts, DataParallel()])


class _Context:
    def __init__(self, part, params):
        self.names = {p: f"p{i}" for i, p in enumerate(params)}
        self.params, self.trained = params, {name: p.detach() for p, name in self.names.items()}
        self.state, self.notes, self.in_progress = part.init({name: p for p, name in self.names.items()}), {}, {}
        self.divisor, self.device, self.parted = 4.0, torch.device("cpu"), False
        self.coded = False
        self.round, self.clock, self.step_square = 0, (0, 1), torch.ones((), dtype=torch.float64)

    def withhold_if(self, found, then):
        assert not found
        then(False)

    def scale_rate(self, factor): ...

    def norm(self, grads):
        return nn.utils.get_total_norm(grads)


def _at_gradient(part):
    return any(act.stage is Stage.GRADIENT for act in part.acts())


# Parts that act on whole gradients, at their examples.
MADE = [
    part(**part.example)
    for part in every().values()
    if not part.divides and any(claim.stage is Stage.GRADIENT for claim in claims(part).values())
]


@pytest.mark.parametrize("part", MADE, ids=lambda part: switch_of(type(part)))
def test_a_part_acts_on_the_gradient_at_its_example(part):
    """So that the next test sees it."""
    assert _at_gradient(part), f"`example` of {type(part).__name__} leaves out its act at GRADIENT: change it"


def _on_gradients():
    """Every set of these parts that composes."""
    made = [part for part in MADE if _at_gradient(part)]
    for n in range(2, len(made) + 1):
        for parts in itertools.combinations(made, n):
            with contextlib.suppress(StrategyError):
                compose(parts)
                yield parts


COMMUTE = "acts do not commute: order them with a fact, see `How parts find their order` in docs/design/architecture.md"


@pytest.mark.parametrize("parts", list(_on_gradients()), ids=lambda parts: "-".join(switch_of(type(p)) for p in parts))
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
        params = [nn.Parameter(torch.randn(3)) for _ in range(4)]
        for p in params:
            p.grad = torch.randn(3) * 100
        contexts = {act.switch: _Context(act.part, params) for act in acts}
        grads = [p.grad for p in params]
        for act in order:
            act.call(grads, contexts[act.switch])
        results.append((grads, [(ctx.state, ctx.in_progress) for ctx in contexts.values()]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], msg=lambda why: f"{COMMUTE}\n{why}")
