"""A run that is resumed on the same ranks equals the unbroken one, bit for bit: random models, strategies and steps."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import fleet
from fleetx.comm.session import current
from rank_pool import Ranks

WIDTH = 150  # DGC compresses tensors of 16384 elements
END = 9


class Crossed(nn.Module):
    """Uses its modules in another order than it registers them, so that DDP reorders its buckets."""

    def __init__(self, norm):
        super().__init__()
        self.last, self.first = nn.Linear(7, 3), nn.Linear(6, WIDTH)
        self.norm, self.inner, self.drop = norm, nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.mid = nn.Linear(WIDTH, 7)

    def forward(self, x):
        return self.last(torch.tanh(self.mid(self.drop(self.inner(self.norm(torch.tanh(self.first(x))))))))


NORMS = [lambda: nn.BatchNorm1d(WIDTH), lambda: nn.LayerNorm(WIDTH), nn.Identity]
SGD = "SGD"
DECLARED = [
    ({}, ""),
    ({"gradient_merge": {"k_steps": 3}}, ""),
    ({"gradient_merge": {"k_steps": 2}, "clip": {"clip_norm": 0.1}}, ""),
    ({"amp": {"dtype": "float16", "incr_every_n_steps": 2}}, ""),
    ({"fuse_grad_size_in_MB": 0.01}, ""),
    ({"fp16_allreduce": True, "gradient_merge": {"k_steps": 2}}, ""),
    ({"sync_batch_norm": True}, ""),
    ({"lars": True}, SGD),
    ({"localsgd": {"k_steps": 3}}, "apart"),
    ({"localsgd": {"k_steps": 2, "overlap": True}}, "apart"),
    ({"localsgd": {"k_steps": 2, "outer_momentum": 0.5, "outer_lr": 0.7}}, "apart"),
    ({"localsgd": {"k_steps": 2}, "gradient_merge": {"k_steps": 2}}, "apart"),
    ({"adaptive_localsgd": {"init_k_steps": 2}}, "apart"),
    ({"dgc": {"sparsity": [0.9]}}, SGD + " apart"),
    ({"dgc": {"sparsity": [0.9]}, "gradient_merge": {"k_steps": 2}}, SGD + " apart"),
    ({"sharding": {"stage": 2}}, "divided"),
    ({"sharding": {"stage": 3}, "gradient_merge": {"k_steps": 2}}, "divided"),
]


def build(case):
    draw = random.Random(case)
    declared, kind = draw.choice(
        [d for d in DECLARED if fleet.worker_num() > 1 or not ("apart" in d[1] or "div" in d[1])]
    )
    torch.manual_seed(case)
    model = Crossed(draw.choice(NORMS)())
    momentum = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = momentum if SGD in kind or draw.random() < 0.5 else torch.optim.AdamW(model.parameters(), lr=0.01)
    by_folder = "divided" in kind or draw.random() < 0.7
    current().entries.clear()
    made = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**declared))
    torch.manual_seed(100 * case + fleet.worker_index())
    return made, by_folder, draw.randint(1, END - 1), declared


def steps(model, optimizer, first, last):
    for _ in range(first, last):
        fleet.backward(mse_loss(model(torch.randn(4, 6)), torch.randn(4, 3)), optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()


def values(model, optimizer):
    found = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    return [v._local_tensor.clone() if hasattr(v, "_local_tensor") else v.clone() for v in found if torch.is_tensor(v)]


def differing(cases, folder):
    """The cases in which the resumed run differs on this rank."""
    fleet.init()
    bad = []
    for case in cases:
        (model, optimizer), by_folder, cut, declared = build(case)
        steps(model, optimizer, 0, cut)
        if by_folder:
            fleet.save(f"{folder}/{case}")
        else:
            saved = [model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]
            file = f"{folder}/{case}-{fleet.worker_index()}"
            torch.save(saved, file)
        steps(model, optimizer, cut, END)
        want = values(model, optimizer)
        (model, optimizer), *_ = build(case)
        if by_folder:
            fleet.load(f"{folder}/{case}")
        else:
            saved = torch.load(file)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            torch.set_rng_state(saved[2])
        steps(model, optimizer, cut, END)
        found = values(model, optimizer)
        if len(found) != len(want) or not all(map(torch.equal, found, want)):
            bad.append((case, declared, cut, by_folder))
    return bad


@pytest.fixture(scope="module")
def three():
    pool = Ranks(3)
    yield pool
    pool.stop()


def test_alone(tmp_path):
    assert differing(range(12), tmp_path) == []


def test_on_two_ranks(ranks, tmp_path):
    assert ranks.run(differing, range(100, 106), tmp_path) == [[]] * 2


def test_on_three_ranks(three, tmp_path):
    assert three.run(differing, range(200, 216), tmp_path) == [[]] * 3


@pytest.mark.parametrize("cases", [range(300, 302), pytest.param(range(302, 312), marks=pytest.mark.nightly)], ids=len)
def test_on_four_ranks(four, tmp_path, cases):
    assert four.run(differing, cases, tmp_path) == [[]] * 4


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x, left):
        return self.left(x) if left else self.right(x)


def uses_one_branch(folder):
    """The momentum of the branch that this rank uses, before and after a load; the other branch has none."""
    fleet.init()
    strategy = fleet.DistributedStrategy(localsgd={"k_steps": 4}, find_unused_parameters=True)

    def made():
        current().entries.clear()
        model = Branches()
        return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)

    def momentum(model, optimizer):
        named = ((name, optimizer.state.get(p, {}).get("momentum_buffer")) for name, p in model.named_parameters())
        return {name: m.clone() for name, m in named if m is not None}

    model, optimizer = made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.ones(2, 4), left=fleet.worker_index() == 0).sum().backward()
    optimizer.step()
    before = momentum(model, optimizer)
    fleet.save(folder)
    model, optimizer = made()
    fleet.load(folder)
    return before, momentum(model, optimizer)


def test_a_rank_gets_no_momentum_of_a_branch_that_only_another_one_has_used(ranks, tmp_path):
    for side, (before, after) in zip(("left", "right"), ranks.run(uses_one_branch, tmp_path / "here"), strict=True):
        assert set(before) == {f"{side}.weight", f"{side}.bias"}
        torch.testing.assert_close(after, before, rtol=0, atol=0)
