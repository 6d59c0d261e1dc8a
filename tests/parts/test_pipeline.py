"""Stages x micro-batches x replicas are one process with the big batch: losses, norms, parameters.

The bound: after ten steps every parameter is within 2e-6 + 2e-5 * |p| of plain PyTorch in float64, which is what plain
PyTorch in float32 keeps too. Only the order of sums differs.
"""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import StrategyError, UsageError, fleet
from fleetx.parts.pipeline import schedules
from rank_pool import RankError, Ranks
from training import adam, adamw, assert_close, sgd, weights

SINGLE = ["1F1B", "F-then-B", "GPipe"]
SEVERAL = [mode for mode in schedules.MODES if mode not in SINGLE]


def deep():
    """Blocks that differ in size."""
    torch.manual_seed(0)
    sizes = [6, 16, 12, 8, 12, 16, 8, 3]
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)))


def data(steps=10, size=16):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 6, generator=g), torch.randn(size, 3, generator=g)) for _ in range(steps)]


def reference(batches, *, make=deep, optimizer=sgd, clip=None, every=1):
    """Plain PyTorch in float64."""
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
    """Returns losses and what this rank holds."""
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
    """What all ranks hold, who hold a thing twice hold the same."""
    whole: dict[str, torch.Tensor] = {}
    for _, held, _ in results:
        for name, value in held.items():
            assert torch.equal(whole.setdefault(name, value), value), name
    return whole


def assert_near(results, want):
    losses, _, whole = want
    found = merged(results)
    assert found.keys() == whole.keys()
    torch.testing.assert_close(found, whole, rtol=2e-5, atol=2e-6)
    replicas = max(index for *_, index in results) + 1
    first = [next(losses for losses, _, index in results if index == i) for i in range(replicas)]
    for mine, _, index in results:
        assert mine == first[index]  # on every rank of a pipeline
    for i, loss in enumerate(losses):
        assert sum(f[i] for f in first) / replicas == pytest.approx(loss, rel=1e-5)


def config(starts, number, mode="1F1B", **more):
    return {"stages": starts, "accumulate_steps": number, "schedule_mode": mode} | more


# --- equal to the big batch -----------------------------------------------------------------------
@pytest.mark.parametrize("mode", SINGLE)
def test_two_stages(ranks, mode):
    assert_near(ranks.run(piped, {"pipeline": config(["3"], 4, mode)}, data()), reference(data()))


@pytest.mark.parametrize("mode", SEVERAL)
def test_two_stages_on_each_of_two_ranks(ranks, mode):
    assert_near(ranks.run(piped, {"pipeline": config(["2", "4", "6"], 4, mode)}, data()), reference(data()))


@pytest.mark.parametrize(
    "declared",
    [
        config(["2", "4", "5"], 4),
        config(["2", "4", "5"], 8, "F-then-B"),
        config(["3"], 4),
        config(["1", "2", "3", "4", "5", "6"][:3], 4, "ZBVZeroBubble"),
        config(["2", "4", "6"], 4, "Interleaved1F1B"),
    ],
    ids=lambda d: f"{len(d['stages']) + 1} stages {d['schedule_mode']}",
)
def test_four_ranks_as_one_pipeline_or_as_two(four, declared):
    assert_near(four.run(piped, {"pipeline": declared}, data()), reference(data()))


def test_the_clipped_norm_is_that_of_the_whole_model(ranks):
    declared = {"pipeline": config(["3"], 4), "clip": {"clip_norm": 0.05}}
    want = reference(data(), clip=0.05)
    assert min(want[1]) > 0.05  # it does clip
    assert_near(ranks.run(piped, declared, data()), want)


def test_merged_steps_are_more_micro_batches(ranks):
    declared = {"pipeline": config(["3"], 4), "gradient_merge": {"k_steps": 2}}
    assert_near(ranks.run(piped, declared, data()), reference(data(), every=2))


@pytest.mark.parametrize("mode", ["1F1B", "InterleavedZeroBubble"])
def test_recompute_changes_nothing(ranks, mode):
    starts = ["3"] if mode == "1F1B" else ["2", "4", "6"]
    plain = {"pipeline": config(starts, 4, mode)}
    declared = plain | {"recompute": {"checkpoints": ["1", "4", "5"]}}
    for (a, held, _), (b, other, _) in zip(
        ranks.run(piped, declared, data()), ranks.run(piped, plain, data()), strict=True
    ):
        assert a == b
        torch.testing.assert_close(held, other, rtol=0, atol=0)


def lars(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


@pytest.mark.parametrize(
    ("declared", "optimizer"),
    [({"lars": {"lars_coeff": 0.01}}, lars), ({"lamb": True}, adam), ({}, adamw)],
    ids=["lars", "lamb", "adamw"],
)
def test_the_update_is_that_of_the_same_strategy_on_one_rank(ranks, declared, optimizer):
    def alone():
        fleet.init()
        model = deep()
        model, o = fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))
        for x, y in data():
            mse_loss(model(x), y).backward()
            o.step()
            o.zero_grad()
        return weights(model)

    results = ranks.run(piped, declared | {"pipeline": config(["3"], 4)}, data(), deep, optimizer)
    assert_close(merged(results), alone())


@pytest.mark.parametrize("amp", [{"dtype": "bfloat16"}, {"init_loss_scaling": 1024.0}], ids=["bfloat16", "float16"])
def test_under_amp_the_micro_batches_are_those_of_one_rank(ranks, amp):
    """In half precision sums differ by more: so the same micro-batches, merged on one rank, are compared."""
    results = ranks.run(piped, {"amp": amp, "pipeline": config(["3"], 4)}, data())
    fleet.init()
    model = deep()
    strategy = fleet.DistributedStrategy(amp=amp, gradient_merge={"k_steps": 4})
    model, o = fleet.distribute(model, sgd(model), strategy)
    for x, y in data():
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            mse_loss(model(a), b).backward()
            o.step()
            o.zero_grad()
    torch.testing.assert_close(merged(results), weights(model), rtol=1e-3, atol=1e-4)


def overflowing(declared, batches):
    """A loss that is infinite in one micro-batch of the second step."""
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
    return updated, weights(model)


def test_an_overflow_in_one_stage_skips_the_update_of_all(ranks):
    declared = {"amp": {"init_loss_scaling": 64.0}, "pipeline": config(["3"], 4)}
    for updated, _ in ranks.run(overflowing, declared, data(4)):
        assert updated == [True, False, True, True]


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
    """Between two pipelines of two stages: at neutral settings the result is the plain one."""

    def plain_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if "localsgd" in more else 0.9)

    results = four.run(
        piped, more | {"pipeline": config(["3"], 4)}, data(), deep, _plain if "localsgd" in more else sgd
    )
    found = merged(results)
    want = reference(data(), optimizer=plain_sgd)[2]
    loose = 5e-3 if "fp16_allreduce" in more else 2e-5
    torch.testing.assert_close(found, want, rtol=loose, atol=loose / 10)


def _plain(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# --- ways to say where stages begin ---------------------------------------------------------------
class Threaded(nn.Module):
    """Blocks that hand on a tuple with a mask and a second stream; placed by device_guard."""

    def __init__(self, guard=True, stages=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList()
        for i in range(4):
            if guard:
                with fleet.device_guard(f"gpu:{i * stages // 4}"):
                    self.blocks.append(Block())
            else:
                self.blocks.append(Block())
        self.head = nn.Linear(6, 3)
        if guard:
            self.head.__dict__["_fleetx_stage"] = stages - 1

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


def test_device_guard_around_blocks_that_thread_a_tuple(ranks):
    results = ranks.run(piped, {"pipeline": {"micro_batch": 4}}, data(), Threaded)
    assert_near(results, reference(data(), make=unguarded))


def test_nothing_is_said_and_the_stages_are_balanced(ranks):
    results = ranks.run(piped, {"pipeline": {"micro_batch": 4}}, data(), deep)
    assert_near(results, reference(data()))
    assert all(held for _, held, _ in results)


def test_parameters_between_modules_are_held_by_all_stages(ranks):
    results = ranks.run(piped, {"pipeline": config(["blocks.2"], 4)}, data(), Scaled)
    assert_near(results, reference(data(), make=Scaled))


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


def test_a_model_of_one_stage_on_one_rank_is_cut_into_micro_batches():
    assert_near([piped({"pipeline": {"micro_batch": 4}}, data())], reference(data()))


# --- what is said -----------------------------------------------------------------------------------
def error(declared, make=deep, size=16, call=None):
    fleet.init()
    model = make()
    try:
        model, _o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
        x, y = data(1, size)[0]
        call(model, x) if call else fleet.forward_backward(x, y, loss_fn=mse_loss)
    except (StrategyError, UsageError) as problem:
        return str(problem)
    return "nothing was said"


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.a(x)
        return self.c(self.b(h) + h)


class Gap(nn.Sequential):
    def __init__(self):
        with fleet.device_guard("stage:0"):
            a = nn.Linear(6, 6)
        with fleet.device_guard("stage:2"):
            b = nn.Linear(6, 3)
        super().__init__(a, b)


class Forgotten(nn.Sequential):
    def __init__(self):
        with fleet.device_guard("stage:0"):
            a = nn.Linear(6, 6)
        with fleet.device_guard("stage:1"):
            b = nn.Linear(6, 3)
        super().__init__(a, nn.Linear(6, 6), b)


class Backwards(nn.Sequential):
    def __init__(self):
        with fleet.device_guard("stage:1"):
            a = nn.Linear(6, 6)
        with fleet.device_guard("stage:0"):
            b = nn.Linear(6, 3)
        super().__init__(a, b)


@pytest.mark.parametrize(
    ("declared", "make", "said"),
    [
        (config(["3"], 3), deep, "a batch of 16 and 3 micro-batches do not fit. Set micro_batch to 2 or 4, or pass "
                                 "batches of 15 or 18 for 3 micro-batches"),
        (config(["3"], 1), deep, "needs at least 2. Set micro_batch to 2 or 4"),
        (config(["3"], 4, micro_batch_size=8), deep, "a batch of 16 does not consist of 4 micro-batches of 8: pass "
                                                     "batches of 32"),
        (config(["2", "4", "6"], 3, "Interleaved1F1B"), deep, "Set micro_batch to 2 or 4, or pass batches of 20 for 4"),
        (config(["3", "4", "5"], 4), deep, "pipeline has 4 stages for 4 ranks, and there are 2: start 4 workers, or "
                                           "make 2 stages"),
        (config(["3"], 4, degree=3), deep, "for 3 ranks, and there are 2"),
        (config(["bocks.2"], 4), unguarded, "the model has no module 'bocks.2': did you mean blocks.2"),
        (config(["3", "3"], 4), deep, "names '3' twice"),
        (config(["3"], 4, "1F2B"), deep, "did you mean '1F1B'"),
        (config(["3"], 4) | {"micro_batch": 2}, deep, "micro_batch = 2 and accumulate_steps = 4 both mean"),
        (config(["1", "2", "3"], 4, degree=2), deep, "1F1B needs one stage on each rank, and 4 on 2 are not: make 2"),
        (config(["c"], 4), Skipping, "nothing was said"),
        (config(["b"], 4), Skipping, "uses a tensor of an earlier stage that is no argument of this module"),
        ({"micro_batch": 4}, Gap, "device_guard placed layers on stages 0, 2, and none on 1"),
        ({"micro_batch": 4}, Forgotten, "1 has parameters and was never placed"),
        ({"micro_batch": 4}, Backwards, "place layers in the order in which they are called"),
        (config(["blocks.2"], 4), Threaded, "'stages'] and device_guard both say"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_with_the_nearest_that_can(ranks, declared, make, said):
    for text in ranks.run(error, {"pipeline": declared}, make):
        assert said in text


def test_ranks_that_do_not_divide(four):
    for text in four.run(error, {"pipeline": config(["2", "4"], 4)}):
        assert "4 ranks do not divide into pipelines of 3: use pipelines of 2 or 4, or start 3 or 6 workers" in text


def call_model(model, x):
    model(x)


def test_the_plain_form_says_which_form_there_is(ranks):
    for text in ranks.run(error, {"pipeline": config(["3"], 4)}, deep, 16, call_model):
        assert "fleet.forward_backward(x, y, loss_fn=...)" in text


@pytest.mark.parametrize("other", ["sharding", "recompute"])
def test_what_does_not_go_together(ranks, other):
    declared = {"sharding": {"sharding": {"sharding_degree": 2}}, "recompute": {"recompute": {"memory_budget": "min"}}}
    texts = ranks.run(error, {"pipeline": config(["3"], 4)} | declared[other])
    for text in texts:
        assert {"sharding": "which Sharding.shard makes it", "recompute": "Recompute.fit cannot take"}[other] in text


def different():
    fleet.init()
    model = deep()
    model, _o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(pipeline=config(["3"], 4)))
    x, y = data(2)[fleet.worker_index()]
    try:
        fleet.forward_backward(x, y, loss_fn=mse_loss)
    except UsageError as problem:
        return str(problem)


def test_ranks_of_one_pipeline_with_different_batches(ranks):
    for text in ranks.run(different):
        assert "ranks 0 to 1 are one pipeline and were given different batches" in text


def evaluated():
    fleet.init()
    model = deep()
    plain = copy.deepcopy(model)
    model, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(pipeline=config(["3"], 4)))
    x, y = data(1)[0]
    with torch.no_grad():
        loss = fleet.forward_backward(x, y, loss_fn=mse_loss)
    assert loss.item() == pytest.approx(mse_loss(plain(x), y).item(), rel=1e-6)
    assert all(p.grad is None for p in model.parameters())
    for size in (16, 8, 16):  # batches of other sizes
        x, y = data(1, size)[0]
        fleet.forward_backward(x, y, loss_fn=mse_loss)
        o.step()
        o.zero_grad()
    assert fleet.updated
    return str(fleet.explain())


def test_evaluation_other_sizes_and_explain(ranks):
    text, _ = ranks.run(evaluated)
    assert "2 stages on 2 ranks" in text
    assert "stages begin with 3" in text
    lines = [line for line in text.splitlines() if "rank 0 |" in line or "rank 1 |" in line]
    assert [line.partition("|")[2].split() for line in lines] == [
        ["F0", "F1", ".", ".", "B0", "-", "F2", "B1", "-", "F3", "B2", "-", ".", "B3", "-", "|"],
        [".", "F0", "B0", "-", "F1", "B1", "-", "F2", "B2", "-", "F3", "B3", "-", ".", ".", "|"],
    ]


# --- what only a careful reader would think of ------------------------------------------------------
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


def noisy():
    return Late(noise=True)


def test_a_parameter_that_one_stage_reads_is_clipped_alike_on_all_that_hold_it(ranks):
    declared = {"pipeline": config(["k"], 4), "clip": {"clip_norm": 0.05}}
    assert_near(ranks.run(piped, declared, data(), Late), reference(data(), make=Late, clip=0.05))


def noises(declared):
    """What code between modules drew, as each rank sees it."""
    fleet.init()
    model = noisy()
    model, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    seen = []
    for x, y in data(2):
        drawn = []
        hook = model.a.register_forward_pre_hook(lambda m, args, drawn=drawn: drawn.append(args[0].detach()))
        fleet.forward_backward(
            x, y, loss_fn=lambda out, y, seen=seen: seen.append(out[1].clone()) or mse_loss(out[0], y)
        )
        o.step()
        o.zero_grad()
        hook.remove()
        seen.append([d - c for d, c in zip(drawn[-4:], x.chunk(4), strict=False)])
    return seen


def test_code_between_modules_draws_the_same_numbers_in_all_stages(ranks):
    first, last = ranks.run(noises, {"pipeline": config(["k"], 4)})
    added = [n for step in first if isinstance(step, list) for n in step[-4:]]
    known = [n for n in last if not isinstance(n, list)]
    assert len(known) == 8
    for a, b in zip(added, known, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert not torch.equal(known[0], known[1])
    assert not torch.equal(known[0], known[4])


def clip_by_hand(model, x):
    y = torch.zeros(len(x), 3)
    fleet.forward_backward(x, y, loss_fn=mse_loss)
    nn.utils.clip_grad_norm_([p for p in model.parameters() if not p.is_meta], 0.01)
    engine = fleet._engine(None)
    engine.optimizer.step()


def test_clipping_by_hand_is_told_of_the_strategy(ranks):
    for text in ranks.run(error, {"pipeline": config(["3"], 4)}, deep, 16, clip_by_hand):
        assert "strategy.clip = True" in text


def weighted(weights_of):
    fleet.init()
    model = deep()
    declared = {"pipeline": config(["3"], 2), "gradient_merge": {"k_steps": 2}}
    model, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    said = ""
    for i, (x, y) in enumerate(data(4)):
        n = weights_of[fleet.worker_index()][i]
        fleet.weight(n)
        try:
            fleet.forward_backward(x, y, loss_fn=lambda out, y, n=n: (out - y).square().sum() / n)
        except UsageError as problem:
            said = str(problem)
            break
        o.step()
        o.zero_grad()
    return said, all(p.isfinite().all() for p in model.parameters() if not p.is_meta)


def test_a_share_that_counts_for_nothing_leaves_no_nan(ranks):
    assert ranks.run(weighted, [[48, 0, 48, 48]] * 2) == [("", True)] * 2


def test_ranks_of_a_pipeline_must_give_the_same_weight(ranks):
    for said, _ in ranks.run(weighted, [[48] * 4, [24] * 4]):
        assert "different batches, or weights" in said


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Tempered(), nn.Linear(6, 3)

    def forward(self, x):
        h, temperature = self.a(x)
        return self.b(h / temperature)


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.temperature = nn.Linear(6, 6), 1.0

    def forward(self, x):
        return self.inner(x), self.temperature


def annealed():
    fleet.init()
    model = Annealed()
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(pipeline=config(["b"], 4, "F-then-B")))
    x, y = data(1)[0]
    fleet.forward_backward(x, y, loss_fn=mse_loss)
    model.a.temperature = 0.5
    if fleet.worker_index() == 1:
        fleet.forward_backward(x, y, loss_fn=mse_loss)
    else:
        with pytest.raises(UsageError, match=r"'a' returned \[0.5\] besides tensors, and \[1.0\] before"):
            fleet.forward_backward(x, y, loss_fn=mse_loss)
        raise SystemExit  # as an error would: the other waits for it


def test_a_plain_value_that_changes_is_said():
    pool = Ranks(2)
    try:
        with pytest.raises(RankError, match="SystemExit"):
            pool.run(annealed)
    finally:
        pool.stop()


class TwoHeads(nn.Module):
    """Of which the first stage has one."""

    def __init__(self):
        super().__init__()
        self.a, self.early, self.b = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        h = self.a(x)
        early = self.early(h)
        return self.b(h), early


def both_heads(found, y):
    return mse_loss(found[0], y) + mse_loss(found[1], y)


def early_head():
    fleet.init()
    model = TwoHeads()
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(pipeline=config(["b"], 4, "F-then-B")))
    x, y = data(1)[0]
    if fleet.worker_index() == 0:
        fleet.forward_backward(x, y, loss_fn=both_heads)
    else:
        warnings.simplefilter("ignore")  # torch's, of tensors with data among those without; this process ends here
        with pytest.raises(UsageError, match="the loss reads what an earlier stage returned"):
            fleet.forward_backward(x, y, loss_fn=both_heads)
        raise SystemExit


def test_a_loss_that_reads_what_an_earlier_stage_returned_is_refused():
    pool = Ranks(2)
    try:
        with pytest.raises(RankError, match="SystemExit"):
            pool.run(early_head)
    finally:
        pool.stop()


class Inplace(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


def test_a_stage_may_begin_with_a_module_that_writes_in_place(ranks):
    assert_near(ranks.run(piped, {"pipeline": config(["1"], 4)}, data(), Inplace), reference(data(), make=Inplace))


def frozen_half():
    model = deep()
    for p in model[3:].parameters():
        p.requires_grad_(False)
    return model


def trained_half(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def test_a_stage_without_trained_parameters_beside_replicas(four):
    results = four.run(piped, {"pipeline": config(["3"], 4)}, data(), frozen_half, trained_half)
    assert_near(results, reference(data(), make=frozen_half, optimizer=trained_half))


class Normed(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_statistics_are_those_of_the_micro_batches_counted_once(ranks):
    results = ranks.run(piped, {"pipeline": config(["2"], 4)}, data(), Normed)
    model = Normed()
    o = sgd(model)
    for x, y in data():
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            (mse_loss(model(a), b) / 4).backward()
        o.step()
        o.zero_grad()
    torch.testing.assert_close(merged(results), weights(model), rtol=2e-5, atol=2e-6)
