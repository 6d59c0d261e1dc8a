"""The arithmetic of predictions, on numbers that can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fleetx import DistributedStrategy
from fleetx.planner.candidates import offered
from fleetx.planner.cost import account, terms_of
from fleetx.planner.model_profile import LinearFit, Piece, Way, Work
from fleetx.strategy.cost_model import Cluster, Link

MB = 1 << 20
WIRE = Link(latency=0.0, speed=100 * MB)
SCENE = Cluster(
    ranks=2, inside=2, flat=WIRE, gather=WIRE, scatter=WIRE, inner=WIRE, outer=WIRE, stream=1e15, memory=1 << 40,
    sixteen={},
)  # fmt: skip
PIECES = tuple(Piece(str(i), 0.25, 50 * MB, border=0, saved=MB, starts=i > 0) for i in range(4))
WORK = Work(
    samples=8, plain=Way(LinearFit(0.0, 0.1), LinearFit(0.0, 0.2), LinearFit(800 * MB, 4 * MB)),
    update=0.5, parameters=200 * MB,
    gradients=200 * MB, state=400 * MB, buffers=0, floor=900 * MB, pieces=PIECES,
)  # fmt: skip


def cost(cluster=SCENE, work=WORK, feed=8, **switches):
    parts = DistributedStrategy(**switches).plan().parts
    return account(terms_of(parts, cluster, work), work, work.plain, feed)


def test_a_line_goes_through_two_points_and_near_three():
    line = LinearFit.through([(2, 5.0), (4, 9.0)])
    assert (line.base, line.slope) == pytest.approx((1.0, 2.0))
    assert LinearFit.through([(4, 8.0)]).at(2) == 4.0
    assert LinearFit.through([(1, 1.0), (2, 3.0)]).base == 0.0, "no batch takes less than no time"


def test_one_rank_sends_nothing():
    alone = cost(replace(SCENE, ranks=1, inside=1))
    assert alone.network == 0
    assert alone.seconds == pytest.approx(8 * 0.3 + 0.5)
    assert alone.peak == 900 * MB, "the update takes more than forward and backward of so few"


def test_a_reduction_is_hidden_but_for_its_last_bucket():
    # 4 buckets of 50 MB, half a second each; backward makes one in 0.4 s: 0.4 + 4 * 0.5 - 1.6 are left
    assert cost().network == pytest.approx(0.8)
    fast = replace(SCENE, flat=Link(0.0, 1000 * MB))
    assert cost(fast).network == pytest.approx(0.05), "of a fast link only the last bucket is seen"


def test_buckets_are_as_large_as_the_user_says():
    assert cost(fuse_grad_size_in_MB=200).network == pytest.approx(2.0), "all of it, when backward is over"


def test_a_core_that_is_busy_with_the_network_is_missed_by_backward():
    busy = replace(SCENE, flat=Link(0.0, 1e15, busy=0.1 / (200 * MB)))
    assert cost(busy).network == pytest.approx(0.1)
    assert cost(replace(busy, device="cuda")).network == pytest.approx(0.0, abs=1e-6)


def test_merged_steps_reduce_and_update_once():
    merged = cost(gradient_merge={"k_steps": 4}, feed=2)
    assert merged.compute == pytest.approx(4 * 2 * 0.3)
    assert merged.update == 0.5
    assert merged.network == pytest.approx(0.1 + 4 * 0.5 - 0.4)


def test_half_the_bytes_take_half_the_time_and_a_period_divides_it():
    late = cost(localsgd={"k_steps": 4})
    assert late.network == pytest.approx(2.0 / 4)
    assert cost(fp16_allreduce=True).network < cost().network


def test_a_pipeline_waits_for_its_stages():
    found = cost(pipeline={"degree": 2, "accumulate_steps": 4}, feed=16)
    slot = 4 * 0.3 / 2
    assert found.compute == pytest.approx(4 * slot)
    assert found.waiting == pytest.approx(slot)
    assert found.network == 0
    assert found.peak < cost(feed=16).peak


def test_in_a_pipeline_of_unequal_stages_the_others_are_passed_through_once():
    uneven = replace(WORK, pieces=(replace(PIECES[0], seconds=0.75), replace(PIECES[1], seconds=0.25)))
    found = cost(work=uneven, pipeline={"degree": 2, "accumulate_steps": 4}, feed=16)
    whole = 4 * 0.3  # a micro-batch of 4 through both stages
    assert found.compute == pytest.approx(4 * 0.75 * whole)
    assert found.waiting == pytest.approx(0.25 * whole)


def test_weights_that_two_stages_have_are_held_twice_and_reduced_between_them():
    free = replace(WORK, plain=replace(WORK.plain, peak=LinearFit(800 * MB, 0.0)))
    tied = replace(free, pieces=(*PIECES[:3], replace(PIECES[3], tied=((0, 50 * MB, 7),))))
    both = [cost(work=work, pipeline={"degree": 2, "accumulate_steps": 2}, feed=16) for work in (free, tied)]
    assert both[1].network - both[0].network == pytest.approx(0.5)
    assert both[0].peak == 400 * MB
    assert both[1].peak == 600 * MB, "three quarters of all"


def test_each_micro_batch_under_way_has_its_own_casts():
    cast = replace(WORK.plain, peak=LinearFit(900 * MB, 0.0), casts=100.0 * MB)
    parts = DistributedStrategy(pipeline={"degree": 2, "accumulate_steps": 2}).plan().parts
    found = account(terms_of(parts, SCENE, WORK), WORK, cast, 16)
    assert found.peak == (400 + 2 * 50) * MB


def test_parameters_are_averaged_beside_all_that_is_there():
    much = replace(WORK, averaged=150 * MB)
    assert cost(work=much, localsgd={"k_steps": 4}).peak == 950 * MB


def test_shards_keep_a_part_and_send_half_as_much_again():
    found = cost(sharding={"sharding_degree": 2, "stage": 2})
    assert found.network == pytest.approx(4.0), "a gathering and a scattering, which nothing hides"
    assert cost(sharding={"sharding_degree": 2, "stage": 3}).network == pytest.approx(6.0)
    assert found.update == 0.25


def test_tiers_send_over_the_outer_link_once():
    cluster = replace(SCENE, ranks=4, flat=Link(0.0, 10 * MB), outer=Link(0.0, 20 * MB), inner=Link(0.0, 1e15))
    tiers = cost(cluster, use_hierarchical_allreduce=True)
    assert tiers.network < cost(cluster).network


def test_what_limits_is_said():
    assert cost().limit(1 << 40) == "compute"
    assert cost(replace(SCENE, flat=Link(0.0, MB))).limit(1 << 40) == "link"
    assert cost().limit(MB) == "memory"
    assert cost(pipeline={"degree": 2, "accumulate_steps": 1}, feed=1).limit(1 << 40) in ("bubble", "compute")


def test_work_survives_being_written_down():
    work = replace(
        WORK, ways={"AMP": Way(LinearFit(0.0, 0.5), LinearFit(0.0, 0.6), LinearFit(1.0, 2.0)), "fp16": Way(error="no")}
    )
    assert Work.of(json.loads(json.dumps(work.written()))) == work


def plans(allow="exact", declared=None, **cluster):
    strategy = DistributedStrategy(**(declared or {}))
    return list(offered(strategy, replace(SCENE, **cluster), WORK, allow=allow))


def test_every_plan_cuts_the_global_batch_evenly():
    found = plans(global_batch=24)
    assert len({plan.title for plan in found}) == len(found) > 20
    for plan in found:
        assert plan.feed * plan.terms.merged * plan.terms.replicas == 24
        assert plan.feed % plan.terms.micro == 0


def test_without_a_global_batch_the_loop_stays_as_it_is():
    found = plans()
    assert {plan.feed for plan in found} == {8}
    assert not any("pipeline" in plan.chosen or "gradient_merge" in plan.chosen for plan in found)


def test_only_what_is_allowed_is_offered():
    names = {level: {name for plan in plans(level) for name in plan.chosen} for level in ("exact", "bf16", "lossy")}
    assert names["exact"] == {"recompute", "sharding"}
    assert names["bf16"] - names["exact"] == {"amp", "fp16_allreduce"}
    assert names["lossy"] - names["bf16"] == {"dgc", "localsgd"}


def test_what_the_user_set_is_kept_and_what_contradicts_it_is_not_offered():
    found = plans("lossy", {"localsgd": {"k_steps": 7}, "gradient_merge": {"k_steps": 3}, "amp": False})
    assert found
    for plan in found:
        assert plan.strategy.localsgd_configs["k_steps"] == 7
        assert plan.terms.merged == 3
        assert not {"dgc", "amp", "fp16_allreduce", "sharding"} & set(plan.chosen)
