"""auto: a plan on which all ranks agree, that is kept, repeated without it, and honest about what cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fleetx import DistributedStrategy, StrategyError, UsageError, fleet
from fleetx.planner import choose

QUICK = {"cache": False, "trials": 1, "max_seconds": 20.0}


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEETX_CACHE", str(tmp_path / "cache"))


def deep(width=64):
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(width, width), nn.Tanh())], nn.Linear(width, 5))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def sample(n=16, width=64):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(n, width, generator=generator), torch.randint(0, 5, (n,), generator=generator)


def distributed(strategy, batch=None, **given):
    model = deep()
    return fleet.distribute(model, sgd(model), strategy, sample=batch or sample(), loss_fn=cross_entropy, **given)


def steps(model, optimizer, feed, number=4):
    x, y = sample(64)
    for i in range(number):
        rows = [(i * feed + j) % 64 for j in range(feed)]
        fleet.forward_backward(x[rows], y[rows], loss_fn=cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def _auto_and_repeated(folder, settings):
    os.chdir(folder)
    os.environ["FLEETX_CACHE"] = f"{folder}/cache{os.environ.get('RANK', '')}"
    fleet.init()
    model, optimizer = distributed(DistributedStrategy(auto=QUICK | settings))
    told = fleet.batch()
    found = steps(model, optimizer, told.feed)
    again = deep()
    again, optimizer = fleet.distribute(again, sgd(again), DistributedStrategy.load(told.path))
    x, y = sample(64)
    for i in range(4):
        rows = [(i * told.feed + j) % 64 for j in range(told.feed)]
        fleet.forward_backward(x[rows], y[rows], loss_fn=cross_entropy, model=again)
        optimizer.step()
        optimizer.zero_grad()
    both = zip(found, again.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in both if not a.is_meta)  # what another stage holds has no values here
    return told.strategy.declared(), told.feed, told.merged, told.total, same


@pytest.mark.parametrize("settings", [{}, {"global_batch": 32}, {"global_batch": 32, "allow": "lossy"}])
def test_ranks_take_the_same_plan_and_its_file_repeats_the_run_bit_for_bit(settings, ranks, tmp_path):
    first, second = ranks.run(_auto_and_repeated, str(tmp_path), settings)
    assert first == second
    assert first[3] == 32
    assert first[4], "the run without auto is the run with it"
    assert "auto" not in (tmp_path / "strategy.yaml").read_text().split("\n", 2)[2]


def test_the_search_leaves_model_optimizer_and_random_numbers_as_they_were():
    fleet.init()
    model = deep()
    optimizer = sgd(model)
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    choose(model, optimizer, DistributedStrategy(auto=QUICK), fleet._here(), sample=sample(), loss_fn=cross_entropy)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def _own_samples(folder, size):
    """Every rank brings a batch of its own, as loaders do."""
    os.chdir(folder)
    fleet.init()
    model, rank = deep(), fleet.worker_index()
    generator = torch.Generator().manual_seed(rank)
    n = size if rank == 0 else 16
    mine = torch.randn(n, 64, generator=generator), torch.randint(0, 5, (n,), generator=generator)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    strategy = DistributedStrategy(auto=QUICK | {"global_batch": 32}, pipeline={"accumulate_steps": 2})
    try:
        found = choose(model, sgd(model), strategy, fleet._here(), sample=mine, loss_fn=cross_entropy)
    except UsageError as error:
        return str(error)
    return found.feed, found.replicas, "failed" in str(found), torch.equal(before, torch.get_rng_state())


def test_ranks_may_bring_different_samples_of_one_shape_and_a_pipeline_of_the_user_is_one_replica(ranks, tmp_path):
    assert ranks.run(_own_samples, str(tmp_path), 16) == [(32, 1, False, True)] * 2
    for told in ranks.run(_own_samples, str(tmp_path), 12):
        assert "rank 0 and rank 1 have different shapes" in told


def test_what_fails_when_tried_is_never_chosen_and_its_words_are_shown_as_they_are(monkeypatch):
    from fleetx.planner import search
    from fleetx.planner.trial import Trial

    monkeypatch.setattr(search, "tried", lambda *_, **__: Trial(error="[/somewhere] broke [bold]"))
    fleet.init()
    with pytest.raises(StrategyError, match=r"no plan could be run. .*\[/somewhere\] broke"):
        distributed(DistributedStrategy(auto=QUICK | {"global_batch": 32}))


def test_brackets_in_an_error_are_no_markup():
    from fleetx.planner.report import table
    from fleetx.planner.search import Considered

    class Made:
        title, feed = "as it is [1]", 4

    account = type("StepCost", (), {"seconds": 1.0, "peak": 1})()
    assert "[/x] bad" in table([Considered(Made(), account, why="[/x] bad")])


def test_a_strategy_that_cannot_be_and_a_batch_that_cannot_be_cut_are_said_to_be_so():
    fleet.init()
    with pytest.raises(StrategyError, match="sharding_degree = 8 does not divide 1 rank"):
        distributed(DistributedStrategy(auto=QUICK, sharding=True))
    model = deep()
    with pytest.raises(UsageError, match="needs a loss of one number"):
        fleet.distribute(model, sgd(model), DistributedStrategy(auto=QUICK), sample=sample()[0])


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 5)

    def forward(self, x):
        return self.inner(x) * (2.0 if x.sum().item() > 0 else 1.0)


def test_a_model_whose_way_depends_on_values_is_refused_by_name():
    fleet.init()
    model = Asks()
    with pytest.raises(UsageError, match="the bytes of this model cannot be counted"):
        fleet.distribute(model, sgd(model), DistributedStrategy(auto=QUICK), sample=sample(), loss_fn=cross_entropy)


def test_one_worker_has_a_choice_too():
    fleet.init()
    distributed(DistributedStrategy(auto=QUICK | {"global_batch": 48}))
    told = fleet.batch()
    assert told.feed * told.merged == told.total == 48
    assert "plans predicted" in str(told)
    assert str(told) in str(fleet.explain())


def test_what_the_user_set_is_kept():
    fleet.init()
    distributed(DistributedStrategy(auto=QUICK | {"global_batch": 48}, gradient_merge={"k_steps": 3}, clip=True))
    told = fleet.batch()
    assert (told.feed, told.merged) == (16, 3)
    assert told.strategy.clip
    assert not told.strategy.auto


def test_less_memory_means_smaller_steps_and_none_is_an_error():
    fleet.init()
    batch = sample(512)
    settings = QUICK | {"global_batch": 512, "trials": 0}
    plans = {}
    for memory in ("100MiB", "700KiB"):
        model = deep()
        strategy = DistributedStrategy(auto=settings | {"memory_budget": memory})
        plans[memory] = choose(model, sgd(model), strategy, fleet._here(), sample=batch, loss_fn=cross_entropy)
    assert plans["100MiB"].feed == 512
    assert plans["700KiB"].feed < 512 or plans["700KiB"].strategy.recompute
    with pytest.raises(StrategyError, match=r"no plan fits into 50.0 KiB. The least is .* by .* would help"):
        distributed(DistributedStrategy(auto=settings | {"memory_budget": "50KiB"}), batch)


def test_the_objective_memory_takes_the_fewest_bytes():
    fleet.init()
    taken = {}
    for objective in ("throughput", "memory"):
        model = deep()
        settings = QUICK | {"global_batch": 512, "trials": 0, "objective": objective}
        strategy = DistributedStrategy(auto=settings)
        taken[objective] = choose(model, sgd(model), strategy, fleet._here(), sample=sample(512), loss_fn=cross_entropy)
    assert taken["memory"].feed < taken["throughput"].feed


def test_without_a_sample_the_two_lines_to_add_are_shown():
    fleet.init()
    model = deep()
    with pytest.raises(UsageError, match=r"(?s)Add two lines:.*sample=\(x, y\), loss_fn=loss_fn"):
        fleet.distribute(model, sgd(model), DistributedStrategy(auto=True))
    with pytest.raises(UsageError, match=r"must be a pair: sample=\(inputs, targets\)"):
        fleet.distribute(model, sgd(model), DistributedStrategy(auto=True), sample=sample()[0], loss_fn=cross_entropy)


def test_a_sample_that_the_model_cannot_take_is_said_to_be_so():
    fleet.init()
    with pytest.raises(UsageError, match="could not be run with the sample that was given: RuntimeError"):
        distributed(DistributedStrategy(auto=QUICK), sample(16, width=63))


def test_batches_that_would_change_the_global_batch_are_refused():
    fleet.init()
    model, optimizer = distributed(
        DistributedStrategy(auto=QUICK | {"global_batch": 48}, gradient_merge={"k_steps": 3})
    )
    x, y = sample(64)
    for n in (8, 48):
        with pytest.raises(UsageError, match=f"planned for 16 samples at a time, and a batch of {n} came"):
            cross_entropy(model(x[:n]), y[:n])
    steps(model, optimizer, 16)
    cross_entropy(model(x[:3]), y[:3]).backward()  # the tail of the data
    optimizer.step()
    model.eval()
    with torch.no_grad():
        assert model(x).shape == (64, 5)


def test_fleet_batch_is_for_auto():
    fleet.init()
    model = deep()
    fleet.distribute(model, sgd(model))
    with pytest.raises(UsageError, match="auto is not on"):
        fleet.batch()


def test_a_plan_is_kept_for_the_next_run_and_a_file_of_the_user_is_left_alone(tmp_path):
    Path("strategy.yaml").write_text("amp: true\n")
    fleet.init()
    strategy = DistributedStrategy(auto=QUICK | {"cache": True})
    model = deep()
    first, second = (
        choose(model, sgd(model), strategy, fleet._here(), sample=sample(), loss_fn=cross_entropy) for _ in range(2)
    )
    assert "chosen before" not in first.text
    assert "chosen before" in second.text
    assert (second.strategy, second.feed) == (first.strategy, first.feed)
    assert Path("strategy.yaml").read_text() == "amp: true\n"
    assert Path(first.path).name == "strategy.auto.yaml"


SCRIPT = """
import torch
from torch import nn
from fleetx import fleet
fleet.init()
model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sample = torch.randn(8, 32), torch.randint(0, 3, (8,))
fleet.distribute(model, optimizer, sample=sample, loss_fn=nn.functional.cross_entropy)
print("trained", flush=True)
"""


def test_fleetx_plan_of_a_script_that_distributes_nothing_says_so():
    Path("never.py").write_text("print('nothing')\n")
    result = subprocess.run(
        [sys.executable, "-m", "fleetx.cli", "plan", "never.py", "--device", "cpu"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "never.py ended without fleet.distribute" in result.stderr


def test_fleetx_plan_runs_a_script_up_to_its_plan(tmp_path):
    Path("train.py").write_text(SCRIPT)
    words = ["--nproc_per_node", "2", "--device", "cpu", "--trials", "1", "--global_batch", "16"]
    asked = ["--nodes", "4", "--link", "1GB/s", "--memory", "1GiB"]
    result = subprocess.run(
        [sys.executable, "-m", "fleetx.cli", "plan", "train.py", *words, *asked],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "trained" not in result.stdout
    assert "batch: 16 =" in result.stdout
    assert Path("strategy.yaml").exists()
    assert "4 nodes" in result.stdout
