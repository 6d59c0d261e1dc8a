"""The arithmetic of predictions, on numbers that can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from fleetx import DistributedStrategy
from fleetx.planner.candidates import offered
from fleetx.planner.cost import step_cost, terms_of
from fleetx.planner.model_profile import BlockShare, ForwardProfile, LinearFit, ModelProfile
from fleetx.strategy.cost_model import Cluster, Link
from fleetx.strategy.part import every

MB = 1 << 20
WIRE = Link(latency=0.0, speed=100 * MB)
CLUSTER = Cluster(
    ranks=2, ranks_per_host=2, all_reduce=WIRE, all_gather=WIRE, reduce_scatter=WIRE, inner=WIRE, outer=WIRE,
    bandwidth=1e15, memory=1 << 40, all_reduce_16bit={},
)  # fmt: skip
BLOCKS = tuple(BlockShare(str(i), 0.25, 50 * MB, border=0, saved=MB, can_start_stage=i > 0) for i in range(4))
PROFILE = ModelProfile(
    samples=8, declared=ForwardProfile(LinearFit(0.0, 0.1), LinearFit(0.0, 0.2), LinearFit(800 * MB, 4 * MB)),
    update=0.5, parameters=200 * MB, gradients=200 * MB, state=400 * MB, buffers=0, update_peak=900 * MB, blocks=BLOCKS,
)  # fmt: skip


def cost(cluster=CLUSTER, profile=PROFILE, feed=8, **switches):
    parts = DistributedStrategy(**switches).plan().parts
    return step_cost(terms_of(parts, cluster, profile), profile, profile.declared, feed)


def test_a_line_goes_through_two_points_and_near_three():
    line = LinearFit.through([(2, 5.0), (4, 9.0)])
    assert (line.base, line.slope) == pytest.approx((1.0, 2.0))
    assert LinearFit.through([(4, 8.0)]).at(2) == 4.0
    assert LinearFit.through([(1, 1.0), (2, 3.0)]).base == 0.0, "no batch takes negative time"


def test_one_rank_communicates_nothing():
    alone = cost(replace(CLUSTER, ranks=1, ranks_per_host=1))
    assert alone.network == 0
    assert alone.seconds == pytest.approx(8 * 0.3 + 0.5)
    assert alone.peak == 900 * MB, "the update needs more than forward and backward of a small batch"


def test_only_the_last_bucket_of_a_reduction_is_not_hidden():
    # 4 buckets of 50 MB, half a second each; backward makes one in 0.4 s: 0.4 + 4 * 0.5 - 1.6 are left
    assert cost().network == pytest.approx(0.8)
    fast = replace(CLUSTER, all_reduce=Link(0.0, 1000 * MB))
    assert cost(fast).network == pytest.approx(0.05), "on a fast link only the last bucket is exposed"


def test_buckets_are_as_large_as_the_user_says():
    assert cost(fuse_grad_size_in_MB=200).network == pytest.approx(2.0), "one bucket, reduced after backward"


def test_communication_slows_backward_down_on_a_cpu():
    busy = replace(CLUSTER, all_reduce=Link(0.0, 1e15, busy=0.1 / (200 * MB)))
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


def test_codes_divide_the_bytes_of_an_average():
    assert cost(localsgd={"k_steps": 4}, quantized_allreduce=True).network == pytest.approx(2.0 / 4 * (1 + 4 / 256) / 4)
    slow = replace(CLUSTER, bandwidth=200 * MB)  # so that a pass over the gradients takes a second
    plain, coded = (cost(slow, localsgd={"k_steps": 4}, **wire).overhead for wire in ({}, {"fp16_allreduce": True}))
    assert coded - plain == pytest.approx(5 / 4), "once per average"


def test_islands_reduce_on_the_inner_link_in_every_update_and_on_the_outer_one_once_per_period():
    fast, slow = Link(0.0, 1000 * MB), Link(0.0, 10 * MB)
    two = replace(CLUSTER, ranks=4, inner=fast, outer=slow, all_reduce=slow)
    assert cost(two, localsgd={"k_steps": 4}).network == pytest.approx(20 / 4)
    inner = 50 / 1000  # the last of four buckets: a ring of two ranks passes on each byte once
    found = cost(two, localsgd={"k_steps": 4, "group_size": 2}).network
    assert found == pytest.approx(inner + (20 + 0.2) / 4)
    assert cost(two, localsgd={"k_steps": 4, "group_size": "host"}).network == pytest.approx(found)


def test_auto_offers_islands_where_hosts_have_several_ranks():
    two = replace(CLUSTER, ranks=4)
    offers = [dict(offer.settings) for offer in every()["localsgd"].offers(two)]
    assert {"k_steps": 4, "group_size": 2} in offers
    assert all("group_size" not in offer.settings for offer in every()["localsgd"].offers(CLUSTER))


def test_a_pipeline_waits_for_its_stages():
    found = cost(pipeline={"degree": 2, "accumulate_steps": 4}, feed=16)
    slot = 4 * 0.3 / 2
    assert found.compute == pytest.approx(4 * slot)
    assert found.bubble == pytest.approx(slot)
    assert found.network == 0
    assert found.peak < cost(feed=16).peak


def test_the_bubble_of_unequal_stages_is_one_pass_through_the_shorter_ones():
    uneven = replace(PROFILE, blocks=(replace(BLOCKS[0], seconds=0.75), replace(BLOCKS[1], seconds=0.25)))
    found = cost(profile=uneven, pipeline={"degree": 2, "accumulate_steps": 4}, feed=16)
    whole = 4 * 0.3  # a micro-batch of 4 through both stages
    assert found.compute == pytest.approx(4 * 0.75 * whole)
    assert found.bubble == pytest.approx(0.25 * whole)


def test_weights_shared_by_two_stages_are_held_twice_and_reduced_between_them():
    free = replace(PROFILE, declared=replace(PROFILE.declared, peak=LinearFit(800 * MB, 0.0)))
    tied = replace(free, blocks=(*BLOCKS[:3], replace(BLOCKS[3], tied=((0, 50 * MB, 7),))))
    both = [cost(profile=profile, pipeline={"degree": 2, "accumulate_steps": 2}, feed=16) for profile in (free, tied)]
    assert both[1].network - both[0].network == pytest.approx(0.5)
    assert both[0].peak == 400 * MB
    assert both[1].peak == 600 * MB, "three quarters of the model"


def test_each_micro_batch_in_flight_has_its_own_casts():
    cast = replace(PROFILE.declared, peak=LinearFit(900 * MB, 0.0), cast_bytes=100.0 * MB)
    parts = DistributedStrategy(pipeline={"degree": 2, "accumulate_steps": 2}).plan().parts
    found = step_cost(terms_of(parts, CLUSTER, PROFILE), PROFILE, cast, 16)
    assert found.peak == (400 + 2 * 50) * MB


def test_averaging_parameters_needs_extra_memory():
    much = replace(PROFILE, averaging=150 * MB)
    assert cost(profile=much, localsgd={"k_steps": 4}).peak == 950 * MB


def test_shards_keep_a_part_and_send_half_as_much_again():
    found = cost(sharding={"sharding_degree": 2, "stage": 2})
    assert found.network == pytest.approx(4.0), "an all-gather and a reduce-scatter, neither hidden"
    assert cost(sharding={"sharding_degree": 2, "stage": 3}).network == pytest.approx(6.0)
    assert found.update == 0.25


def test_hierarchical_reduction_uses_the_outer_link_once():
    cluster = replace(CLUSTER, ranks=4, all_reduce=Link(0.0, 10 * MB), outer=Link(0.0, 20 * MB), inner=Link(0.0, 1e15))
    tiers = cost(cluster, use_hierarchical_allreduce=True)
    assert tiers.network < cost(cluster).network


def test_the_bottleneck_is_named():
    assert cost().bottleneck(1 << 40) == "compute"
    assert cost(replace(CLUSTER, all_reduce=Link(0.0, MB))).bottleneck(1 << 40) == "link"
    assert cost().bottleneck(MB) == "memory"
    assert cost(pipeline={"degree": 2, "accumulate_steps": 1}, feed=1).bottleneck(1 << 40) in ("bubble", "compute")


def test_a_profile_survives_json():
    amp = ForwardProfile(LinearFit(0.0, 0.5), LinearFit(0.0, 0.6), LinearFit(1.0, 2.0))
    tied = (*BLOCKS[:3], replace(BLOCKS[3], tied=((0, 50 * MB, 7),)))
    profile = replace(
        PROFILE, blocks=tied, shapes=((2, 3), ()), variants={"AMP": amp, "fp16": ForwardProfile(error="no")}
    )
    assert ModelProfile.parse(json.loads(json.dumps(asdict(profile)))) == profile


def plans(allow="exact", declared=None, **cluster):
    strategy = DistributedStrategy(**(declared or {}))
    return list(offered(strategy, replace(CLUSTER, **cluster), PROFILE, [], allow=allow))


def test_every_plan_splits_the_global_batch_evenly():
    found = plans(global_batch=24)
    assert len({plan.title for plan in found}) == len(found) > 20
    for plan in found:
        assert plan.feed * plan.terms.merged * plan.terms.replicas == 24
        assert plan.feed % plan.terms.micro_batches == 0


def test_without_a_global_batch_the_batch_size_does_not_change():
    found = plans()
    assert {plan.feed for plan in found} == {8}
    assert not any("pipeline" in plan.chosen or "gradient_merge" in plan.chosen for plan in found)


def test_only_what_is_allowed_is_offered():
    names = {level: {name for plan in plans(level) for name in plan.chosen} for level in ("exact", "bf16", "lossy")}
    assert names["exact"] == {"recompute", "sharding"}
    assert names["bf16"] - names["exact"] == {"amp", "fp16_allreduce"}
    assert names["lossy"] - names["bf16"] == {"dgc", "localsgd", "quantized_allreduce"}


def test_declared_parts_are_kept_and_conflicting_ones_are_not_offered():
    found = plans("lossy", {"localsgd": {"k_steps": 7}, "gradient_merge": {"k_steps": 3}, "amp": False})
    assert found
    for plan in found:
        assert plan.strategy.localsgd_configs["k_steps"] == 7
        assert plan.terms.merged == 3
        assert not {"amp", "sharding"} & set(plan.chosen)
        assert len({"dgc", "fp16_allreduce", "quantized_allreduce"} & set(plan.chosen)) <= 1


def test_what_acts_between_replicas_is_offered_with_sharding_only_where_there_are_some():
    for ranks, groups in ((2, False), (4, True)):
        others = {"amp": False, "recompute": False, "use_hierarchical_allreduce": False, "pipeline": False}
        found = [p for p in plans("lossy", others, ranks=ranks, ranks_per_host=2) if "sharding" in p.chosen]
        between = [p for p in found if {"dgc", "localsgd", "fp16_allreduce", "quantized_allreduce"} & set(p.chosen)]
        assert found
        assert bool(between) == groups
        assert all(p.chosen["sharding"]["sharding_degree"] == 2 for p in between)


def test_fewer_bits_shorten_the_reduce_scatter():
    by_bits = {b: cost(sharding={"sharding_degree": 2, "stage": 2, "gradient_bits": b}).network for b in (32, 16, 8)}
    saved = {bits: by_bits[32] - seconds for bits, seconds in by_bits.items()}
    assert saved[8] / saved[16] == pytest.approx((1 - 0.25 - 1 / 256) / (1 - 0.5 - 1 / 256))


def test_replicas_divide_the_orthogonalization_of_muon_and_gather_its_result():
    # 0.5 s of update: 7 passes over 200 MB at 14000 MB/s are 0.1 s on each rank; the rest is divided
    cluster = replace(CLUSTER, bandwidth=14000 * MB)
    alone, muon, whole = (cost(cluster, **s) for s in ({}, {"muon": True}, {"muon": {"divide": False}}))
    assert alone.update == whole.update == 0.5
    assert muon.update == pytest.approx(0.1 + 0.4 / 2)
    assert muon.network == pytest.approx(alone.network + 2.0), "an all-gather of 200 MB"
    assert whole.network == pytest.approx(alone.network)


def test_an_average_of_the_parameters_costs_a_pass_over_both():
    cluster = replace(CLUSTER, bandwidth=600 * MB)
    assert cost(cluster, ema=True).overhead == pytest.approx(cost(cluster).overhead + 1.0)
