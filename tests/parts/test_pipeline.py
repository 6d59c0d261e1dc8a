"""Stages x micro-batches x replicas equal one process with the whole batch: losses, norms, parameters.

The bound: after ten steps every parameter is within 2e-6 + 2e-5 * |p| of plain PyTorch in float64, which plain PyTorch
in float32 achieves too. Only the order of sums differs.
"""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import UsageError, fleet
from fleetx.parts.pipeline import runtime, schedules
from training import adam, adamw, assert_close, assert_equal, sgd, train_fleet, weights


def deep():
    """Blocks that differ in size."""
    torch.manual_seed(0)
    sizes = [6, 16, 12, 8, 12, 16, 8, 3]
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)))


def data(steps=10, size=16):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 6, generator=g), torch.randn(size, 3, generator=g)) for _ in range(steps)]


def reference(batches, *, make=deep, optimizer=sgd, clip=None, every=1):
    """Plain PyTorch in float64: losses, norms, parameters."""
    model = make().double()
    o = optimizer(model)
    losses, norms = [], []
    for i, (x, y) in enumerate(batches):
        loss = mse_loss(model(x.double()), y.double())
        (loss / every).backward()
        losses.append(loss.item())
        if (i + 1) % every == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
            o.step()
            o.zero_grad()
    return losses, norms, weights(model.float())


def piped(declared, batches, make=deep, optimizer=sgd):
    """Losses, what this rank holds, and which replica it is in."""
    fleet.init()
    model = make()
    model, o = fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))
    losses = []
    for x, y in batches:
        x, y = (t.chunk(fleet.replica_num())[fleet.replica_index()] for t in (x, y))
        losses.append(fleet.forward_backward(x, y, loss_fn=mse_loss).item())
        o.step()
        o.zero_grad()
    return losses, weights(model), fleet.replica_index()


def merged(results):
    """What all ranks hold together. Ranks that hold the same tensor must agree bit for bit."""
    total: dict[str, torch.Tensor] = {}
    for _, held, _ in results:
        for name, value in held.items():
            assert torch.equal(total.setdefault(name, value), value), name
    return total


def assert_near(results, want):
    losses, _, parameters = want
    torch.testing.assert_close(merged(results), parameters, rtol=2e-5, atol=2e-6)
    replicas = max(index for *_, index in results) + 1
    first = [next(losses for losses, _, index in results if index == i) for i in range(replicas)]
    for mine, _, index in results:
        assert mine == first[index]  # on every rank of a pipeline
    for i, loss in enumerate(losses):
        assert sum(f[i] for f in first) / replicas == pytest.approx(loss, rel=1e-5)


def config(starts, number, mode="1F1B", **more):
    return {"stages": starts, "accumulate_steps": number, "schedule_mode": mode} | more


# --- equal to the whole batch ---------------------------------------------------------------------
TWO, FOUR = ["3"], ["2", "4", "6"]  # where two and four stages begin


@pytest.mark.parametrize("mode", [mode for mode in schedules.MODES if mode != "GPipe"])
def test_every_schedule_on_two_ranks(ranks, mode):
    starts = TWO if schedules.MODES[mode][1] == schedules.SINGLE else FOUR
    assert_near(ranks.run(piped, {"pipeline": config(starts, 4, mode)}, data()), reference(data()))


def test_gpipe_is_another_name_for_f_then_b():
    assert schedules.MODES["GPipe"] == schedules.MODES["F-then-B"]


@pytest.mark.parametrize(
    "declared",
    [
        config(["2", "4", "5"], 4),
        config(TWO, 4),
        config(FOUR, 4, "Interleaved1F1B"),
        config(["2", "4", "5"], 8, "F-then-B"),
        config(["1", "2", "3"], 4, "ZBVZeroBubble"),
    ],
    ids=lambda d: f"{len(d['stages']) + 1} stages {d['schedule_mode']}",
)
def test_four_ranks_as_one_pipeline_or_as_two(four, declared):
    assert_near(four.run(piped, {"pipeline": declared}, data()), reference(data()))


def traced(batches):
    with patch.object(runtime, "trace", wraps=runtime.trace) as made:
        results = piped({"pipeline": config(TWO, 2)}, batches)
    return made.call_count, results


def test_each_shape_of_batch_is_traced_once_and_its_trace_kept_longer_than_its_buffers(ranks):
    sizes = [4 * n for n in range(1, runtime.MAX_RUNNERS + 3)]
    batches = [batch for size in sizes * 2 for batch in data(1, size)]
    found = ranks.run(traced, batches)
    assert [number for number, _ in found] == [len(sizes)] * 2
    assert_near([results for _, results in found], reference(batches))


def test_a_single_rank_runs_the_micro_batches_itself():
    assert_near([piped({"pipeline": {"micro_batch": 4}}, data())], reference(data()))


def test_the_clipped_norm_is_that_of_the_whole_model(ranks):
    """All stages hold a parameter of Late that only the last one reads: it must be clipped alike on all of them."""
    want = reference(data(), make=Late, clip=0.05)
    assert min(want[1]) > 0.05  # it does clip
    declared = {"pipeline": config(["k"], 4), "clip": {"clip_norm": 0.05}}
    assert_near(ranks.run(piped, declared, data(), Late), want)


def ones(dtype):
    """One number per stage: the norm of several overflows in plain PyTorch too."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).to(dtype)
    for p in model.parameters():
        nn.init.ones_(p)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def clipped(scale, dtype):
    fleet.init()
    model, o = ones(dtype)
    declared = {"pipeline": {"micro_batch": 2, "stages": ["1"]}, "clip": {"clip_norm": 1.0}}
    model, o = fleet.distribute(model, o, fleet.DistributedStrategy(**declared))
    x = torch.ones(2, 1, dtype=dtype)
    fleet.forward_backward(x, x, loss_fn=lambda out, y: (out * y).mean() * scale)
    o.step()
    return weights(model)


@pytest.mark.parametrize("scale", [1e20, 1e-20, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_clip_neither_overflows_nor_rounds_to_float32(ranks, scale, dtype):
    """The stages add up the squares of their norms, and 1e40 is no number in float32."""
    model, o = ones(torch.float64)
    (model(torch.ones(2, 1, dtype=torch.float64)).mean() * scale).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    o.step()
    found = {name: value.double() for held in ranks.run(clipped, scale, dtype) for name, value in held.items()}
    bound = 1e-15 if dtype is torch.float64 else 1e-6
    torch.testing.assert_close(found, weights(model), rtol=bound, atol=0)


def test_merged_steps_are_more_micro_batches(ranks):
    declared = {"pipeline": config(TWO, 4), "gradient_merge": {"k_steps": 2}}
    assert_near(ranks.run(piped, declared, data()), reference(data(), every=2))


@pytest.mark.parametrize("mode", ["1F1B", "InterleavedZeroBubble"])
def test_recompute_changes_nothing(ranks, mode):
    plain = {"pipeline": config(TWO if mode == "1F1B" else FOUR, 4, mode)}
    declared = plain | {"recompute": {"checkpoints": ["1", "4", "5"]}}
    with_it, without = ranks.run(piped, declared, data(3)), ranks.run(piped, plain, data(3))
    assert [losses for losses, *_ in with_it] == [losses for losses, *_ in without]
    assert_equal(merged(with_it), merged(without))


def lars(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


@pytest.mark.parametrize(
    ("declared", "optimizer"),
    [({"lars": {"lars_coeff": 0.01}}, lars), ({"lamb": True}, adam), ({}, adamw)],
    ids=["lars", "lamb", "adamw"],
)
def test_the_update_is_that_of_the_same_strategy_on_one_rank(ranks, declared, optimizer):
    results = ranks.run(piped, declared | {"pipeline": config(TWO, 4)}, data(), deep, optimizer)
    assert_close(merged(results), train_fleet(data(), declared, make=deep, optimizer=optimizer))


@pytest.mark.parametrize("amp", [{"dtype": "bfloat16"}, {"init_loss_scaling": 1024.0}], ids=["bfloat16", "float16"])
def test_under_amp_the_micro_batches_are_those_of_one_rank(ranks, amp):
    """In half precision sums differ more, so the same micro-batches are merged on one rank."""
    results = ranks.run(piped, {"amp": amp, "pipeline": config(TWO, 4)}, data())
    chunks = [pair for x, y in data() for pair in zip(x.chunk(4), y.chunk(4), strict=True)]
    want = train_fleet(chunks, {"amp": amp, "gradient_merge": {"k_steps": 4}}, make=deep)
    torch.testing.assert_close(merged(results), want, rtol=1e-3, atol=1e-4)


def overflowing(declared, batches):
    """The loss is infinite in one micro-batch of the second step."""
    fleet.init()
    model = deep()
    model, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    updated = []
    for step, (x, y) in enumerate(batches):
        y = y.clone()
        y[3] = float("inf") if step == 1 else y[3]
        fleet.forward_backward(x, y, loss_fn=mse_loss)
        o.step()
        o.zero_grad()
        updated.append(fleet.updated)
    return updated


def test_an_overflow_in_one_stage_skips_the_update_of_all(ranks):
    declared = {"amp": {"init_loss_scaling": 64.0}, "pipeline": config(TWO, 4)}
    for updated in ranks.run(overflowing, declared, data(4)):
        assert updated == [True, False, True, True]


def no_momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "more",
    [
        {"localsgd": {"k_steps": 1}},
        {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2},
        {"dgc": {"sparsity": [0.0], "rampup_begin_step": 0}},
        {"fp16_allreduce": True},
        {"sync_batch_norm": True},
    ],
    ids=lambda more: next(iter(more)),
)
def test_replicas_reduce_as_the_strategy_says(four, more):
    """Two pipelines of two stages: at neutral settings the result is that of plain PyTorch."""
    optimizer = no_momentum if "localsgd" in more else sgd
    results = four.run(piped, more | {"pipeline": config(TWO, 4)}, data(), deep, optimizer)
    tolerance = 5e-3 if "fp16_allreduce" in more else 2e-5
    want = reference(data(), optimizer=optimizer)[2]
    torch.testing.assert_close(merged(results), want, rtol=tolerance, atol=tolerance / 10)


# --- where stages begin ---------------------------------------------------------------------------
class Threaded(nn.Module):
    """Blocks that pass on a tuple with a mask and a second stream; placed by device_guard."""

    def __init__(self, guard=True):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList()
        for i in range(4):
            with fleet.device_guard(f"gpu:{i // 2}") if guard else nullcontext():
                self.blocks.append(Block())
        with fleet.device_guard("gpu:1") if guard else nullcontext():
            self.head = nn.Linear(6, 3)

    def forward(self, x):
        mask = (x > 0).float()
        state = (x, x * 0.5, {"mask": mask, "count": torch.arange(3)})
        for block in self.blocks:
            state = block(state)
        return self.head(state[0] + state[1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, state):
        x, z, extra = state
        return torch.tanh(self.a(x)) * extra["mask"] + z, torch.tanh(self.b(z)), extra


def unguarded():
    return Threaded(guard=False)


def test_device_guard_around_blocks_that_pass_on_a_tuple(ranks):
    results = ranks.run(piped, {"pipeline": {"micro_batch": 4}}, data(), Threaded)
    assert_near(results, reference(data(), make=unguarded))


def test_without_any_setting_the_stages_are_balanced(ranks):
    results = ranks.run(piped, {"pipeline": {"micro_batch": 4}}, data(), deep)
    assert_near(results, reference(data()))
    assert all(held for _, held, _ in results)


class Scaled(nn.Module):
    """Has a parameter that the code between its modules reads, in both stages."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.scale = nn.Parameter(torch.full((6,), 0.7))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return self.head(x)


class Inplace(nn.Sequential):
    """Its second stage begins with a module that modifies its input."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


@pytest.mark.parametrize(("make", "start"), [(Scaled, "blocks.2"), (Inplace, "1")])
def test_parameters_between_modules_and_modules_that_work_in_place(ranks, make, start):
    results = ranks.run(piped, {"pipeline": config([start], 4)}, data(), make)
    assert_near(results, reference(data(), make=make))


def frozen_half():
    model = deep()
    for p in model[3:].parameters():
        p.requires_grad_(False)
    return model


def trained_half(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def test_a_stage_without_trained_parameters_and_replicas(four):
    results = four.run(piped, {"pipeline": config(TWO, 4)}, data(), frozen_half, trained_half)
    assert_near(results, reference(data(), make=frozen_half, optimizer=trained_half))


# --- evaluation, statistics, random numbers, weights ----------------------------------------------
def evaluated():
    fleet.init()
    model = deep()
    plain = copy.deepcopy(model)
    model, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(pipeline=config(TWO, 4)))
    x, y = data(1)[0]
    with torch.no_grad():
        loss = fleet.forward_backward(x, y, loss_fn=mse_loss)
    assert loss.item() == pytest.approx(mse_loss(plain(x), y).item(), rel=1e-6)
    assert all(p.grad is None for p in model.parameters())
    for size in (16, 8, 16):
        x, y = data(1, size)[0]
        fleet.forward_backward(x, y, loss_fn=mse_loss)
        o.step()
        o.zero_grad()
    assert fleet.updated
    return str(fleet.explain())


def test_evaluation_batches_of_other_sizes_and_explain(ranks):
    text, _ = ranks.run(evaluated)
    assert "2 stages on 2 ranks" in text
    assert "stages begin with 3" in text
    lines = [line for line in text.splitlines() if "rank 0 |" in line or "rank 1 |" in line]
    assert [line.partition("|")[2].split() for line in lines] == [
        ["F0", "F1", ".", ".", "B0", "-", "F2", "B1", "-", "F3", "B2", "-", ".", "B3", "-", "|"],
        [".", "F0", "B0", "-", "F1", "B1", "-", "F2", "B2", "-", "F3", "B3", "-", ".", ".", "|"],
    ]


class Normed(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_statistics_are_those_of_the_micro_batches_counted_once(ranks):
    results = ranks.run(piped, {"pipeline": config(["2"], 4)}, data(), Normed)
    alone = piped({"pipeline": {"micro_batch": 4}}, data(), Normed)
    torch.testing.assert_close(merged(results), alone[1], rtol=2e-5, atol=2e-6)


class Late(nn.Module):
    """A parameter that only the code of the last stage reads, and noise that all stages must share."""

    def __init__(self, noise=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.k, self.noise = nn.Linear(6, 6), nn.Linear(6, 3), noise
        self.scale = nn.Parameter(torch.full((3,), 0.7))

    def forward(self, x):
        noise = torch.randn_like(x) if self.noise else 0.0
        h = self.k(torch.dropout(torch.tanh(self.a(x + noise)), 0.3, self.noise and self.training))
        return (h * self.scale, noise) if self.noise else h * self.scale


def noises(declared):
    """What code between modules drew, as the first stage sees it (in the input of `a`) and the last one."""
    fleet.init()
    model = Late(noise=True)
    model, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    inputs, outputs = [], []
    model.a.register_forward_pre_hook(lambda m, args: inputs.append(args[0].detach()))

    def loss(out, y):
        outputs.append(out[1].clone())
        return mse_loss(out[0], y)

    added = []
    for x, y in data(2):
        fleet.forward_backward(x, y, loss_fn=loss)
        o.step()
        o.zero_grad()
        added += [noisy - chunk for noisy, chunk in zip(inputs[-4:], x.chunk(4), strict=False)]
    return added, outputs


def test_code_between_modules_draws_the_same_numbers_in_all_stages(ranks):
    (added, _), (_, known) = ranks.run(noises, {"pipeline": config(["k"], 4)})
    assert len(known) == 8
    for a, b in zip(added, known, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert not torch.equal(known[0], known[1])
    assert not torch.equal(known[0], known[4])


def weighted(weights_of):
    fleet.init()
    model = deep()
    declared = {"pipeline": config(TWO, 2), "gradient_merge": {"k_steps": 2}}
    model, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    for i, (x, y) in enumerate(data(4)):
        n = weights_of[fleet.worker_index()][i]
        fleet.weight(n)
        try:
            fleet.forward_backward(x, y, loss_fn=lambda out, y, n=n: (out - y).square().sum() / n)
        except UsageError as problem:
            return str(problem)
        o.step()
        o.zero_grad()
    return all(p.isfinite().all() for p in model.parameters() if not p.is_meta)


def test_a_share_of_weight_0_leaves_no_nan(ranks):
    assert ranks.run(weighted, [[48, 0, 48, 48]] * 2) == [True] * 2


def test_ranks_of_a_pipeline_must_give_the_same_weight(ranks):
    for text in ranks.run(weighted, [[48] * 4, [24] * 4]):
        assert "different batches or weights" in text
